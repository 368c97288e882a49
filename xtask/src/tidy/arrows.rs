//! Who may depend on whom (`docs/ARCHITECTURE.md`), read from cargo's resolved graph.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use super::Finding;

/// Each workspace crate, and the workspace crates it may name as dependencies of any kind.
const ALLOWED: [(&str, &[&str]); 12] = [
    ("lazy-model", &[]),
    ("lazy-solver", &["lazy-model"]),
    ("lazy-store", &["lazy-model"]),
    ("lazy-runtime", &["lazy-model", "lazy-store"]),
    ("lazy-optim-nvme", &["lazy-model", "lazy-store"]),
    ("train-lm", &["lazy-model", "lazy-solver", "lazy-store", "lazy-runtime", "lazy-optim-nvme"]),
    ("bench-optim", &["lazy-model", "lazy-store", "lazy-optim-nvme"]),
    ("bench-runtime", &["lazy-model", "lazy-solver", "lazy-store", "lazy-runtime"]),
    ("embed-burn", &["lazy-model", "lazy-store", "lazy-runtime"]),
    ("embed-cuda", &["lazy-model", "lazy-store", "lazy-runtime"]),
    ("embed-candle", &["lazy-model", "lazy-store", "lazy-runtime"]),
    ("xtask", &[]),
];

/// Packages that only the named workspace crates may reach. Cargo's graph is that of the whole workspace, where lazy-runtime has candle: what
/// uses lazy-runtime without it is named there, too.
const CONFINED: [(&str, &[&str]); 2] = [
    ("coin_cbc", &["lazy-solver", "bench-runtime", "train-lm"]),
    (
        "candle-core",
        &["lazy-runtime", "bench-runtime", "embed-burn", "embed-candle", "embed-cuda", "train-lm"],
    ),
];

/// Crates that may reach no package with a `links` key, for they must build on a bare machine.
const WITHOUT_NATIVE: [&str; 1] = ["xtask"];

pub(super) fn check(metadata: &Value, root: &Path) -> Vec<Finding> {
    let graph = Graph::new(metadata);
    let mut findings = Vec::new();
    for member in &graph.members {
        let package = graph.packages[member];
        let name = package["name"].as_str().unwrap_or_default();
        let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
        let text = std::fs::read_to_string(manifest).unwrap_or_default();
        let manifest = manifest.strip_prefix(root).unwrap_or(manifest);
        let mut report = |dependency: &str, advice: String| {
            findings.push(Finding::new(manifest, manifest_line(&text, dependency), advice));
        };
        let Some((_, allowed)) = ALLOWED.iter().find(|(crate_name, _)| *crate_name == name) else {
            report("name", format!("`{name}` is in no table: state its arrows in xtask/src/tidy/arrows.rs"));
            continue;
        };
        for dependency in graph.direct_members(member) {
            if !allowed.contains(&dependency) {
                report(dependency, format!("`{name}` may not depend on `{dependency}`: remove the arrow"));
            }
        }
        for (reached, path) in graph.reach(member) {
            let target = reached["name"].as_str().unwrap_or_default();
            let confined = CONFINED.iter().find(|(package, _)| *package == target);
            if confined.is_some_and(|(_, owners)| !owners.contains(&name)) {
                report(path[0], format!("`{name}` may not reach `{target}` ({})", path.join(" -> ")));
            }
            if WITHOUT_NATIVE.contains(&name) && !reached["links"].is_null() {
                report(path[0], format!("`{name}` may link nothing native ({})", path.join(" -> ")));
            }
        }
    }
    findings
}

/// The line of the manifest that names `dependency`; line 1 if it cannot be told.
fn manifest_line(manifest: &str, dependency: &str) -> usize {
    let names = |line: &str| {
        let rest = line.trim().strip_prefix(dependency);
        rest.is_some_and(|rest| rest.starts_with([' ', '=', '.']))
    };
    manifest.lines().position(names).map_or(1, |index| index + 1)
}

struct Graph<'a> {
    packages: BTreeMap<&'a str, &'a Value>,
    nodes: BTreeMap<&'a str, &'a Value>,
    members: BTreeSet<&'a str>,
}

impl<'a> Graph<'a> {
    fn new(metadata: &'a Value) -> Self {
        let by_id = |list: &'a Value| {
            let entries = list.as_array().into_iter().flatten();
            entries.filter_map(|entry| Some((entry["id"].as_str()?, entry))).collect()
        };
        let members = metadata["workspace_members"].as_array().into_iter().flatten();
        Self {
            packages: by_id(&metadata["packages"]),
            nodes: by_id(&metadata["resolve"]["nodes"]),
            members: members.filter_map(Value::as_str).collect(),
        }
    }

    /// Names of the workspace crates that `member` names itself.
    fn direct_members(&self, member: &str) -> Vec<&'a str> {
        let edges = self.edges(member, true).into_iter();
        edges
            .filter(|id| self.members.contains(id))
            .filter_map(|id| self.packages[id]["name"].as_str())
            .collect()
    }

    /// Every package reached from `member`, with the names on the way. Its own tests' dependencies count.
    fn reach(&self, member: &'a str) -> Vec<(&'a Value, Vec<&'a str>)> {
        let mut seen = BTreeSet::from([member]);
        let mut queue = vec![(member, Vec::new())];
        let mut reached = Vec::new();
        while let Some((id, path)) = queue.pop() {
            for next in self.edges(id, id == member) {
                let Some(package) = self.packages.get(next).filter(|_| seen.insert(next)) else { continue };
                let mut path: Vec<&str> = path.clone();
                path.extend(package["name"].as_str());
                reached.push((*package, path.clone()));
                queue.push((next, path));
            }
        }
        reached
    }

    fn edges(&self, id: &str, with_dev: bool) -> Vec<&'a str> {
        let edges = self.nodes.get(id).and_then(|node| node["deps"].as_array()).into_iter().flatten();
        let counts = |edge: &&Value| {
            let mut kinds = edge["dep_kinds"].as_array().into_iter().flatten();
            kinds.any(|kind| with_dev || kind["kind"] != "dev")
        };
        edges.filter(counts).filter_map(|edge| edge["pkg"].as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Name, `links` key, and dependencies with their kinds (`None` is a normal one).
    type Package<'a> = (&'a str, Option<&'a str>, &'a [(&'a str, Option<&'a str>)]);

    /// What a graph of `packages` is told; those with names of the workspace's crates are members.
    fn advice(packages: &[Package]) -> Vec<String> {
        let member = |name: &str| ALLOWED.iter().any(|(known, _)| *known == name) || name == "stranger";
        let metadata = json!({
            "workspace_members": packages.iter().map(|p| p.0).filter(|n| member(n)).collect::<Vec<_>>(),
            "packages": packages.iter().map(|(name, links, _)| json!({
                "id": name, "name": name, "links": links, "manifest_path": format!("/r/{name}/Cargo.toml"),
            })).collect::<Vec<_>>(),
            "resolve": {"nodes": packages.iter().map(|(name, _, deps)| json!({
                "id": name,
                "deps": deps.iter().map(|(to, kind)| json!({"pkg": to, "dep_kinds": [{"kind": kind}]}))
                    .collect::<Vec<_>>(),
            })).collect::<Vec<_>>()},
        });
        check(&metadata, Path::new("/r")).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn allowed_arrows_pass() {
        let found = advice(&[
            ("lazy-model", None, &[]),
            ("lazy-solver", None, &[("lazy-model", None), ("coin_cbc", None)]),
            ("coin_cbc", None, &[]),
            ("train-lm", None, &[("lazy-solver", None)]),
        ]);
        assert_eq!(found, [""; 0]);
    }

    #[test]
    fn a_forbidden_arrow_is_named_even_from_tests() {
        let found = advice(&[
            ("lazy-model", None, &[]),
            ("lazy-store", None, &[]),
            ("lazy-solver", None, &[("lazy-store", Some("dev"))]),
        ]);
        assert_eq!(
            found,
            ["lazy-solver/Cargo.toml:1: `lazy-solver` may not depend on `lazy-store`: remove the arrow"]
        );
    }

    #[test]
    fn the_solver_reached_through_others_is_found() {
        let found = advice(&[
            ("lazy-runtime", None, &[("good_lp", None)]),
            ("good_lp", None, &[("coin_cbc", None)]),
            ("coin_cbc", None, &[]),
        ]);
        assert_eq!(
            found,
            ["lazy-runtime/Cargo.toml:1: `lazy-runtime` may not reach `coin_cbc` (good_lp -> coin_cbc)"]
        );
    }

    #[test]
    fn dev_dependencies_of_others_do_not_count() {
        let found = advice(&[
            ("lazy-model", None, &[("num", None)]),
            ("num", None, &[("coin_cbc", Some("dev"))]),
            ("coin_cbc", None, &[]),
        ]);
        assert_eq!(found, [""; 0]);
    }

    #[test]
    fn xtask_links_nothing_and_new_crates_are_tabled() {
        let found = advice(&[
            ("xtask", None, &[("zlib-sys", None)]),
            ("zlib-sys", Some("z"), &[]),
            ("stranger", None, &[]),
        ]);
        assert_eq!(found.len(), 2);
        assert!(found[0].contains("`stranger` is in no table"), "{found:?}");
        assert!(found[1].contains("`xtask` may link nothing native (zlib-sys)"), "{found:?}");
    }

    #[test]
    fn manifest_lines_are_found_by_key() {
        let text = "[dependencies]\nlazy-model-extra = \"1\"\nlazy-model.workspace = true\n";
        assert_eq!(manifest_line(text, "lazy-model"), 3);
        assert_eq!(manifest_line(text, "absent"), 1);
    }
}
