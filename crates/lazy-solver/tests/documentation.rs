//! What docs/formats.md gives as a first chain is one. The page is the workspace's, so this file is not in the package.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::Command;

use serde_json::Value;

#[test]
fn the_documented_chain_is_read() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/formats.md");
    let page = std::fs::read_to_string(page).unwrap();
    let section = page.split("## Cost chain").nth(1).unwrap();
    let example: String = section
        .lines()
        .skip_while(|line| *line != "    {")
        .take_while(|line| line.starts_with("    "))
        .collect();
    let chain = Path::new(env!("CARGO_TARGET_TMPDIR")).join("documented.json");
    std::fs::write(&chain, example).unwrap();
    let plan = Command::new(env!("CARGO_BIN_EXE_lazy-plan"))
        .arg("--chain")
        .arg(chain)
        .arg("--json")
        .output()
        .unwrap();
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    assert_eq!((&plan["status"], &plan["placement"]), (&"optimal".into(), &"CCGG".into()), "{plan}");
}
