//! `cargo xtask dist`: programs as single files that run on machines without Rust and without the solver's library.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use clap::{Args, ValueEnum};

use crate::{Outcome, cargo, native, programs};

#[derive(Args)]
pub(crate) struct Options {
    /// Only this program; may be given several times
    #[arg(long = "program", value_name = "NAME")]
    programs: Vec<Name>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Name {
    TrainLm,
    LazyPlan,
    BenchGpu,
}

impl Name {
    /// Its package, its binary target, and features that the target wants.
    fn target(self) -> (&'static str, &'static str, &'static [&'static str]) {
        match self {
            Name::TrainLm => ("train-lm", "train-lm", &[]),
            Name::LazyPlan => ("lazy-solver", "lazy-plan", &["cli"]),
            Name::BenchGpu => ("train-lm", "bench-gpu", &[]),
        }
    }
}

/// What is part of glibc, by the start of its name.
const GLIBC: [&str; 7] =
    ["linux-vdso", "ld-linux", "libc.so", "libm.so", "libpthread.so", "libdl.so", "librt.so"];

pub(crate) fn run(options: &Options) -> Outcome<()> {
    if !cfg!(target_os = "linux") {
        return Err("`dist` makes Linux programs: run it on Linux".into());
    }
    native::ensure_cbc()?;
    let metadata = cargo::metadata()?;
    let target = metadata["target_directory"].as_str().ok_or("cargo names no target folder")?;
    let folder = Path::new(target).join("dist");
    let native = folder.join("native");
    native::static_libraries(&native)?;
    let mut search = OsString::from("native=");
    search.push(&native);
    let compiler = ["-L".into(), search, "-C".into(), "strip=symbols".into()];
    let programs = if options.programs.is_empty() { Name::value_variants() } else { &options.programs[..] };
    for name in programs {
        let (package, binary, features) = name.target();
        let built = programs::build_with(package, binary, features, &compiler)?;
        let file = folder.join(binary);
        let failed = |error| format!("cannot copy {} to {}: {error}", built.display(), file.display());
        let bytes = fs::copy(&built, &file).map_err(failed)?;
        let needs = check(&file)?;
        eprintln!("xtask: {} ({:.1} MiB) needs {needs}", file.display(), bytes as f64 / f64::from(1 << 20));
    }
    Ok(())
}

/// What a program needs: glibc alone, from some version on. It is started once.
fn check(program: &Path) -> Outcome<String> {
    let libraries = loaded(program)?;
    let other: Vec<&String> = libraries.iter().filter(|name| !is_glibc(name)).collect();
    if !other.is_empty() {
        return Err(format!("{} still loads {other:?}, which other machines may lack", program.display()));
    }
    let started = Command::new(program).arg("--help").stdin(Stdio::null()).stdout(Stdio::null()).status();
    if !started.as_ref().is_ok_and(|status| status.success()) {
        return Err(format!("`{} --help` did not succeed: {started:?}", program.display()));
    }
    let bytes = fs::read(program).map_err(|error| format!("cannot read {}: {error}", program.display()))?;
    let (major, minor) = newest_glibc(&bytes).ok_or("the program names no version of glibc")?;
    Ok(format!("glibc {major}.{minor} or newer, nothing else"))
}

/// The libraries that the dynamic loader brings to a program.
fn loaded(program: &Path) -> Outcome<Vec<String>> {
    let output = Command::new("ldd").arg(program).output().map_err(|e| format!("cannot start ldd: {e}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(format!("ldd {}: {}", program.display(), text.trim()));
    }
    Ok(names(&String::from_utf8_lossy(&output.stdout)))
}

/// The names in what `ldd` prints: the first word of each line, without folders.
fn names(ldd: &str) -> Vec<String> {
    let words = ldd.lines().filter_map(|line| line.split_whitespace().next());
    words.map(|word| word.rsplit('/').next().unwrap_or(word).to_owned()).collect()
}

fn is_glibc(name: &str) -> bool {
    GLIBC.iter().any(|start| name.starts_with(start))
}

/// The newest version of glibc among the symbols that a program asks for.
fn newest_glibc(program: &[u8]) -> Option<(u32, u32)> {
    const MARK: &[u8] = b"GLIBC_";
    let number = |text: &mut &[u8]| -> Option<u32> {
        let digits = text.iter().take_while(|b| b.is_ascii_digit()).count();
        let (number, rest) = text.split_at(digits);
        *text = rest.strip_prefix(b".").unwrap_or(rest);
        std::str::from_utf8(number).ok()?.parse().ok()
    };
    let starts = (0..program.len()).filter(|&at| program[at..].starts_with(MARK));
    let version = |at: usize| {
        let mut text = &program[at + MARK.len()..];
        Some((number(&mut text)?, number(&mut text)?))
    };
    starts.filter_map(version).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ldd_prints_is_told_apart() {
        let text = "\tlinux-vdso.so.1 (0x00007f)\n\tlibCbcSolver.so.3 => /lib/libCbcSolver.so.3 (0x1)\n\tlibm.so.6 => \
                    /lib/libm.so.6 (0x2)\n\t/lib64/ld-linux-x86-64.so.2 (0x3)\n";
        let names = names(text);
        let other: Vec<_> = names.iter().filter(|name| !is_glibc(name)).collect();
        assert_eq!((names.len(), other), (4, vec![&"libCbcSolver.so.3".to_owned()]));
    }

    #[test]
    fn versions_are_numbers() {
        let bytes = b"\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBC_2.2.5\0";
        assert_eq!(newest_glibc(bytes), Some((2, 34)));
        assert_eq!(newest_glibc(b"none"), None);
    }

    /// A C program that makes a model of CBC loads nothing beside glibc, where the archives are there; else they are named.
    #[test]
    #[cfg(target_os = "linux")]
    fn the_solver_links_statically() {
        let folder = std::env::temp_dir().join(format!("lazy static {}", std::process::id()));
        let linked = native::static_libraries(&folder).and_then(|()| {
            let program = folder.join("program");
            let source = "void *Cbc_newModel(void); void Cbc_deleteModel(void *);\n\
                          int main(void) { Cbc_deleteModel(Cbc_newModel()); return 0; }\n";
            native::compile(
                source,
                &program,
                &["-L".as_ref(), folder.as_os_str(), "-lCbcSolver".as_ref(), "-lm".as_ref()],
            )?;
            let ran = Command::new(&program).stdout(Stdio::null()).status();
            loaded(&program).map(|names| (names, ran.is_ok_and(|status| status.success())))
        });
        let _ = fs::remove_dir_all(&folder);
        match linked {
            Ok((names, ran)) => assert!(ran && names.iter().all(|name| is_glibc(name)), "{names:?}"),
            Err(message) => assert!(message.contains("static"), "{message}"),
        }
    }
}
