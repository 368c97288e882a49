//! The hardware profile: presets, round trip, and what is refused.
#![allow(clippy::unwrap_used)] // Helpers of tests may unwrap, as tests do.

use lazy_model::{Bytes, HardwareProfile, Marked, Source, StepTimes, Tier};
use serde_json::{Value, json};

fn with_times() -> HardwareProfile {
    let list = |ms: [f64; 2]| Marked::measured(ms.to_vec(), "probe", "2026-11-29T12:00:00Z");
    let one = |ms| Marked::measured(ms, "probe", "2026-11-29T12:00:00Z");
    let times = StepTimes {
        workload: "two layers, batch 1".into(),
        forward_ms: list([14.0, 20.1]),
        saving_forward_ms: list([15.0, 21.3]),
        backward_ms: list([30.7, 41.0]),
        prologue_ms: one(0.3),
        prologue_backward_ms: one(0.2),
        epilogue_ms: one(7.7),
    };
    let preset = HardwareProfile::preset("reference").unwrap();
    HardwareProfile {
        times: Some(times),
        optimizer_elements_per_s: Some(Marked::assumed(4.5e8, "guess")),
        ..preset
    }
}

#[test]
fn presets_carry_the_published_rates_and_are_marked_assumed() {
    let reference = HardwareProfile::preset("reference").unwrap();
    let rates = reference.links.rates();
    // One boundary of the published run takes 62.9 ms to host, 225.4 to NVMe and 266.8 back.
    let boundary = Bytes(754_974_720);
    let ms = |time: lazy_model::Seconds| (time.as_ms() * 10.0).round() / 10.0;
    assert_eq!(
        [
            ms(rates.d2h.time(boundary)),
            ms(rates.nvme_write.time(boundary)),
            ms(rates.nvme_read.time(boundary))
        ],
        [62.9, 225.4, 266.8]
    );
    assert_eq!(reference.links.h2d.source, Source::Assumed);
    assert_eq!(reference.tiers.get(Tier::Host), None);
    for name in HardwareProfile::PRESETS {
        assert!(HardwareProfile::preset(name).is_some(), "{name}");
    }
    assert!(HardwareProfile::preset("abacus").is_none());
}

#[test]
fn a_profile_survives_its_json() {
    for profile in [with_times(), HardwareProfile::preset("h200").unwrap()] {
        assert_eq!(HardwareProfile::from_json(&profile.to_json()).unwrap(), profile);
    }
    let value: Value = serde_json::from_str(&with_times().to_json()).unwrap();
    assert_eq!(value["links"]["d2h_bytes_per_s"]["value"], 12e9);
    assert_eq!(value["times"]["forward_ms"]["source"], "measured");
}

#[test]
fn costs_are_in_seconds() {
    let costs = with_times().costs().unwrap();
    assert_eq!(costs.forward[0].get(), 0.014);
    assert_eq!(costs.epilogue.get(), 0.0077);
    assert!(HardwareProfile::preset("h200").unwrap().costs().is_none());
}

#[test]
fn faults_name_their_key_path() {
    let cases = [
        ("/version", json!(2), "`version` must be 1"),
        ("/links/h2d_bytes_per_s", Value::Null, "`links.h2d_bytes_per_s` is absent"),
        ("/links/d2h_bytes_per_s", json!(12e9), "`links.d2h_bytes_per_s` must be an object"),
        ("/links/d2h_bytes_per_s/value", json!(-1), "`links.d2h_bytes_per_s.value` must be a number"),
        ("/links/d2h_bytes_per_s/source", json!("rumour"), "`links.d2h_bytes_per_s.source` is \"rumour\""),
        ("/links/d2h_bytes_per_s/by", Value::Null, "`links.d2h_bytes_per_s.by` is absent"),
        ("/tiers", json!({"hbm_gib": 70}), "`tiers.hbm_gib` is not a known key"),
        ("/tiers/hbm_bytes/value", json!(1.5), "`tiers.hbm_bytes.value` must be a whole number"),
        ("/times/backward_ms/value", json!([1]), "`times.backward_ms` has 1 layers, but forward_ms has 2"),
        ("/times/backward_ms/value", json!([1, "x"]), "`times.backward_ms.value` must be"),
        ("/times/epilogue_ms/when", Value::Null, "`times.epilogue_ms.when` is absent"),
    ];
    for (pointer, new, wanted) in cases {
        let mut value: Value = serde_json::from_str(&with_times().to_json()).unwrap();
        *value.pointer_mut(pointer).unwrap() = new;
        let found = HardwareProfile::from_json(&value.to_string()).unwrap_err().to_string();
        assert!(found.contains(wanted), "{found} lacks {wanted}");
    }
}
