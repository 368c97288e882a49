//! What cargo cannot bring: a C linker, CBC's library, rustfmt and clippy.

use std::io::stderr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::Outcome;

/// Package managers in the order asked, with the install line for CBC.
const INSTALL_CBC: [(&str, &str); 4] = [
    ("apt-get", "apt-get install coinor-libcbc-dev"),
    ("dnf", "dnf install coin-or-Cbc-devel"),
    ("pacman", "pacman -S coin-or-cbc"),
    ("brew", "brew install coin-or-tools/coinor/cbc pkg-config"),
];

/// Makes sure that binaries which use the solver link: installs CBC where that is possible (apt-get as root),
/// or says how.
pub(crate) fn ensure_cbc() -> Outcome<()> {
    let mut missing = Vec::new();
    if !starts("cc", "--version") {
        missing.push("build-essential");
    }
    if !missing.is_empty() || !links("CbcSolver") {
        missing.push("coinor-libcbc-dev");
    }
    if missing.is_empty() {
        return Ok(());
    }
    if !(is_root() && starts("apt-get", "--version")) {
        return Err(how_to_install(&missing, |program| starts(program, "--version")));
    }
    eprintln!("xtask: installing {} with apt-get", missing.join(" and "));
    // The package lists may be there already; refreshing them is the slow part.
    if !apt_get(&[&["install", "-y"], missing.as_slice()].concat())? {
        apt_get(&["update"])?;
        if !apt_get(&[&["install", "-y"], missing.as_slice()].concat())? {
            return Err(format!("apt-get could not install {}; see its message above", missing.join(" ")));
        }
    }
    if links("CbcSolver") {
        Ok(())
    } else {
        Err("coinor-libcbc-dev is installed, yet `cc -lCbcSolver` does not link: check LIBRARY_PATH".into())
    }
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

fn how_to_install(missing: &[&str], has: impl Fn(&str) -> bool) -> String {
    let compiler = if missing.contains(&"build-essential") { "a C compiler (cc) and " } else { "" };
    let lines: Vec<_> =
        INSTALL_CBC.iter().filter(|(manager, _)| has(manager)).map(|(_, line)| *line).collect();
    let how = if lines.is_empty() {
        INSTALL_CBC.iter().map(|(_, line)| *line).collect::<Vec<_>>().join(" | ")
    } else {
        lines[0].to_owned()
    };
    format!("{compiler}the CBC solver's library is missing; install it, then run this again: {how}")
}

/// Asks the linker itself: only it knows every place it looks in.
fn links(library: &str) -> bool {
    let output: PathBuf = std::env::temp_dir().join(format!("lazy-link-test-{}", std::process::id()));
    let mut command = Command::new("cc");
    // As the build does, look where pkg-config points too.
    command.args(["-shared", "-x", "c", "-"]).args(pkg_config_paths()).arg(format!("-l{library}"));
    let found = succeeds(command.arg("-o").arg(&output));
    // Nothing to remove where the link failed.
    let _ = std::fs::remove_file(output);
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
        let advice = how_to_install(&["coinor-libcbc-dev"], |manager| manager == "dnf");
        assert!(advice.ends_with("again: dnf install coin-or-Cbc-devel"), "{advice}");
        assert!(!advice.contains("compiler"));
    }

    #[test]
    fn advice_without_a_known_manager_names_all_packages() {
        let advice = how_to_install(&["build-essential", "coinor-libcbc-dev"], |_| false);
        for word in ["C compiler", "coinor-libcbc-dev", "coin-or-Cbc-devel", "coin-or-cbc", "coinor/cbc"] {
            assert!(advice.contains(word), "{word} not in: {advice}");
        }
    }
}
