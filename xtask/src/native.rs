//! What cargo cannot bring: a C linker, CBC's library, rustfmt and clippy, programs that benchmarks compare with.

use std::ffi::OsStr;
use std::fs;
use std::io::{Write, stderr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Outcome;

/// Package managers in the order asked: program, install command, packages of a C compiler and of CBC.
const MANAGERS: [(&str, &str, &str, &str); 4] = [
    ("apt-get", "apt-get install", "build-essential", "coinor-libcbc-dev"),
    ("dnf", "dnf install", "gcc", "coin-or-Cbc-devel"),
    ("pacman", "pacman -S", "gcc", "coin-or-cbc"),
    ("brew", "brew install", "gcc", "coin-or-tools/coinor/cbc pkg-config"),
];

/// Makes sure that binaries which use the solver link: installs CBC where that is possible (apt-get as root),
/// or says how.
pub(crate) fn ensure_cbc() -> Outcome<()> {
    let has_compiler = starts("cc", "--version");
    if has_compiler && links("CbcSolver") {
        return Ok(());
    }
    if !(is_root() && starts("apt-get", "--version")) {
        return Err(how_to_install(has_compiler, |program| starts(program, "--version")));
    }
    let (_, _, compiler, cbc) = MANAGERS[0];
    let packages = if has_compiler { vec![cbc] } else { vec![compiler, cbc] };
    eprintln!("xtask: installing {} with apt-get", packages.join(" and "));
    let install = [&["install", "-y"], packages.as_slice()].concat();
    // The package lists may be there already; refreshing them is the slow part.
    if !apt_get(&install)? {
        apt_get(&["update"])?;
        if !apt_get(&install)? {
            return Err(format!("apt-get could not install {}; see its message above", packages.join(" ")));
        }
    }
    if links("CbcSolver") {
        Ok(())
    } else {
        Err(format!("{cbc} is installed, yet `cc -lCbcSolver` does not link: check LIBRARY_PATH"))
    }
}

/// Installs `package` where `program` does not start and that is possible (apt-get as root). Whoever asks can do without.
pub(crate) fn offer(program: &str, argument: &str, package: &str) {
    if starts(program, argument) || !(is_root() && starts("apt-get", "--version")) {
        return;
    }
    eprintln!("xtask: installing {package} with apt-get");
    let install = ["install", "-y", package];
    let installed = apt_get(&install).is_ok_and(|done| done)
        || apt_get(&["update"]).is_ok_and(|done| done) && apt_get(&install).is_ok_and(|done| done);
    if !installed {
        eprintln!("xtask: apt-get could not install {package}; going on without it");
    }
}

/// What CBC is made of, as archives, and what these use. Their order does not matter: the linker goes round.
const ARCHIVES: [&str; 15] = [
    "CbcSolver",
    "Cbc",
    "Cgl",
    "OsiClp",
    "ClpSolver",
    "Clp",
    "Osi",
    "CoinUtils",
    "bz2",
    "z",
    "lapack",
    "blas",
    "stdc++",
    "gcc_eh",
    "gcc",
];

/// LAPACK's own report of a wrong argument, alone of all that CBC uses of it, needs Fortran's run-time library.
const REPORT: &str = r#"
#include <stdio.h>
#include <stdlib.h>
void xerbla_(const char *routine, const int *argument, unsigned long length) {
    fprintf(stderr, "%.*s: argument %d is wrong\n", (int)length, routine, *argument);
    abort();
}
"#;

/// Fills `folder` so that a linker which looks there first takes CBC and the compiler's libraries from archives: under the names that
/// programs ask for lie lists of the archives.
pub(crate) fn static_libraries(folder: &Path) -> Outcome<()> {
    let io = |error| format!("cannot write to {}: {error}", folder.display());
    fs::create_dir_all(folder).map_err(io)?;
    let found: Vec<(&str, Option<PathBuf>)> = ARCHIVES.map(|name| (name, archive(name))).to_vec();
    let missing: Vec<_> = found.iter().filter(|(_, path)| path.is_none()).map(|(name, _)| *name).collect();
    if !missing.is_empty() {
        let names = missing.iter().map(|name| format!("lib{name}.a")).collect::<Vec<_>>().join(", ");
        return Err(format!(
            "a static link needs {names}: Debian and Ubuntu have them in coinor-libcbc-dev, coinor-libcgl-dev, coinor-libclp-dev, \
             coinor-libosi-dev, coinor-libcoinutils-dev, libbz2-dev, zlib1g-dev, liblapack-dev, libblas-dev and build-essential"
        ));
    }
    let report = folder.join("report.o");
    compile(REPORT, &report, &["-c".as_ref(), "-O2".as_ref(), "-fPIC".as_ref()])?;
    let list = |names: &[&str]| -> String {
        let paths =
            found.iter().filter(|(name, _)| names.contains(name)).filter_map(|(_, path)| path.as_ref());
        paths.map(|path| format!("\"{}\" ", path.display())).collect()
    };
    let cbc = format!("GROUP ( \"{}\" {})\n", report.display(), list(&ARCHIVES));
    fs::write(folder.join("libCbcSolver.so"), cbc).map_err(io)?;
    // What Rust's standard library asks for.
    fs::write(folder.join("libgcc_s.so"), format!("GROUP ( {})\n", list(&["gcc_eh", "gcc"]))).map_err(io)
}

/// Where the compiler finds `lib<name>.a`.
fn archive(name: &str) -> Option<PathBuf> {
    let output = Command::new("cc").arg(format!("-print-file-name=lib{name}.a")).output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    path.is_absolute().then(|| path.canonicalize().ok()).flatten()
}

/// Compiles C, or links it where `flags` do not say otherwise.
pub(crate) fn compile(source: &str, output: &Path, flags: &[&OsStr]) -> Outcome<()> {
    let mut command = Command::new("cc");
    command.args(["-x", "c", "-", "-x", "none"]).args(flags).arg("-o").arg(output);
    let failed = |error: std::io::Error| format!("cannot run cc: {error}");
    let mut child = command.stdin(Stdio::piped()).stdout(stderr()).spawn().map_err(failed)?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(source.as_bytes()).map_err(failed)?;
    }
    let status = child.wait().map_err(failed)?;
    if status.success() { Ok(()) } else { Err(format!("cc could not make {}", output.display())) }
}

/// Makes sure that `cargo fmt` and `cargo clippy` exist: minimal toolchains come without.
pub(crate) fn ensure_components() -> Outcome<()> {
    let missing: Vec<_> = [("rustfmt", "fmt"), ("clippy", "clippy")]
        .into_iter()
        .filter(|(_, subcommand)| {
            let mut command = crate::cargo::command(subcommand);
            !succeeds(command.arg("--version").current_dir(crate::cargo::root()))
        })
        .map(|(component, _)| component)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut rustup = Command::new("rustup");
    rustup.args(["component", "add"]).args(&missing).current_dir(crate::cargo::root());
    match rustup.stdin(Stdio::null()).stdout(stderr()).status() {
        Ok(status) if status.success() => Ok(()),
        _ => Err(format!("{} missing: `rustup component add {}`", missing.join(" and "), missing.join(" "))),
    }
}

/// One line for the package manager that is there, or for each known one.
fn how_to_install(has_compiler: bool, is_present: impl Fn(&str) -> bool) -> String {
    let line = |(_, install, compiler, cbc): &(&str, &str, &str, &str)| {
        if has_compiler { format!("{install} {cbc}") } else { format!("{install} {compiler} {cbc}") }
    };
    let how = match MANAGERS.iter().find(|(manager, ..)| is_present(manager)) {
        Some(manager) => line(manager),
        None => MANAGERS.iter().map(line).collect::<Vec<_>>().join(" | "),
    };
    let what = if has_compiler { "" } else { "a C compiler and " };
    // Who is not root may have no `sudo`: it is not assumed.
    format!(
        "{what}the library of the CBC solver must be installed first; do so, as root where the package manager wants that, and run \
         this again: {how}"
    )
}

/// Asks the linker itself: only it knows every place it looks in.
fn links(library: &str) -> bool {
    let output: PathBuf = std::env::temp_dir().join(format!("lazy-link-test-{}", std::process::id()));
    let mut command = Command::new("cc");
    // As the build does, look where pkg-config points too.
    command.args(["-shared", "-x", "c", "-"]).args(pkg_config_paths()).arg(format!("-l{library}"));
    let found = succeeds(command.arg("-o").arg(&output));
    // Nothing to remove where the link failed.
    let _ = fs::remove_file(output);
    found
}

fn pkg_config_paths() -> Vec<String> {
    let output = Command::new("pkg-config").args(["--libs-only-L", "cbc"]).stderr(Stdio::null()).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// Runs apt-get without questions, its output on standard error.
fn apt_get(args: &[&str]) -> Outcome<bool> {
    Command::new("apt-get")
        .args(["-o", "DPkg::Lock::Timeout=120", "-q"])
        .args(args)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .stdout(stderr())
        .status()
        .map(|status| status.success())
        .map_err(|error| format!("cannot start apt-get: {error}"))
}

fn is_root() -> bool {
    let output = Command::new("id").arg("-u").output();
    output.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

fn starts(program: &str, argument: &str) -> bool {
    succeeds(Command::new(program).arg(argument))
}

fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_nowhere_does_not_link() {
        assert!(!links("LazyNoSuchLibrary"));
        assert!(links("c"));
    }

    #[test]
    fn advice_names_the_present_package_manager() {
        let advice = how_to_install(true, |manager| manager == "dnf");
        assert!(advice.ends_with("again: dnf install coin-or-Cbc-devel"), "{advice}");
        let advice = how_to_install(false, |manager| manager == "dnf");
        assert!(advice.ends_with("again: dnf install gcc coin-or-Cbc-devel"), "{advice}");
    }

    #[test]
    fn advice_without_a_known_manager_names_all_packages() {
        let advice = how_to_install(false, |_| false);
        for word in ["C compiler", "coinor-libcbc-dev", "coin-or-Cbc-devel", "coin-or-cbc", "coinor/cbc"] {
            assert!(advice.contains(word), "{word} not in: {advice}");
        }
    }
}
