//! The report: what it shows equals what it was given, and no input breaks it.
#![allow(clippy::unwrap_used)] // Helpers of tests may unwrap, as tests do.

use lazy_model::report::{Compared, Fact, Headline, RunReport, TierOccupancy};
use lazy_model::{Bytes, Lane, Placement, Seconds, Span, Tier};

fn compared(label: &str, unit: &str, promised: Option<f64>, measured: Option<f64>) -> Compared {
    Compared { label: label.into(), unit: unit.into(), promised, measured, recent: None }
}

fn span(name: &str, lane: Lane, start: f64, end: f64, bytes: u64) -> Span {
    let (start, end) = (Seconds(start), Seconds(end));
    Span { name: name.into(), lane, start, end, bytes: Bytes(bytes), blocked_on: None }
}

/// Numbers that came out as no numbers show up in coordinates or text under these names.
fn assert_sound(html: &str) {
    for bad in ["NaN", "inf\"", "-inf", " inf", "infinity"] {
        assert!(!html.contains(bad), "{bad} in {html}");
    }
    assert_eq!(html.matches("<svg").count(), html.matches("</svg>").count());
    assert_eq!(html.matches("<section").count(), html.matches("</section>").count());
    // Nothing outside the page is referred to.
    for bad in ["http:", "https:", "src=", "href=", "url(", "@import", "<script"] {
        assert!(!html.contains(bad), "{bad}");
    }
}

#[test]
fn the_map_shows_every_boundary_where_it_was_placed() {
    use Placement::{Hbm, Host, Nvme, Recompute};
    let report = RunReport {
        placement: vec![Nvme, Host, Recompute, Host, Hbm],
        boundary_bytes: vec![Bytes(1024); 5],
        keep: vec![false, false, true, true],
        ..RunReport::default()
    };
    let html = report.to_html();
    for (i, text) in ["nvme, 1.000 KiB", "host, 1.000 KiB", "recompute", "host", "hbm"].iter().enumerate() {
        // Once in the wide picture, once in the narrow one.
        assert_eq!(html.matches(&format!("boundary {i}: {text}")).count(), 2, "{i}");
    }
    for row in
        ["1 stay in HBM", "2 to host RAM", "1 to NVMe", "1 recomputed", "2 internals kept", "of 4 layers"]
    {
        assert_eq!(html.matches(row).count(), 2, "{row}");
    }
    assert!(html.contains(">2.000 KiB<"), "bytes held in host RAM");
    assert_eq!(html.matches("keeps its internals").count(), 4);
    assert_sound(&html);
}

/// A plan's picture says nothing of what the plan does not know: internals without letters for them, an optimizer without times.
#[test]
fn what_a_plan_does_not_know_is_left_out() {
    let known = RunReport {
        placement: vec![Placement::Hbm; 3],
        keep: vec![true, false],
        spans: vec![
            span("forward 0", Lane::Compute, 0.0, 1.0, 0),
            span("adam", Lane::Optimizer, 1.0, 2.0, 0),
        ],
        ..RunReport::default()
    };
    let without = RunReport { keep: vec![], spans: known.spans[..1].to_vec(), ..known.clone() };
    for (report, shown) in [(known, true), (without, false)] {
        let html = report.to_html();
        for part in ["internals kept", ">Optimizer<", "optimizer</li>"] {
            assert_eq!(html.contains(part), shown, "{part}");
        }
        assert_sound(&html);
    }
}

#[test]
fn the_table_carries_exact_values_and_the_difference() {
    let report = RunReport {
        comparison: vec![
            compared("Step", "s", Some(0.8), Some(0.9)),
            compared("Peak", "bytes", Some(1_073_741_825.0), None),
            compared("Wait", "ms", Some(0.0), Some(3.0)),
            compared("Odd", "ms", Some(f64::NAN), Some(f64::INFINITY)),
        ],
        ..RunReport::default()
    };
    let html = report.to_html();
    for wanted in [
        "data-value=\"0.8\">0.8000 s<",
        "data-value=\"0.9\">0.9000 s<",
        "<td>+12.5%</td>",
        "data-value=\"1073741825\" title=\"1073741825 bytes\">1.000 GiB<",
    ] {
        assert!(html.contains(wanted), "{wanted}");
    }
    let differences: Vec<_> = report.comparison.iter().map(Compared::difference_percent).collect();
    assert!((differences[0].unwrap() - 12.5).abs() < 1e-9);
    assert_eq!(differences[1..], [None, None, None]);
    assert_sound(&html);
}

#[test]
fn losses_peaks_facts_and_tiles_are_those_given() {
    let curve = |peak| vec![(Seconds(0.0), Bytes(0)), (Seconds(0.5), Bytes(peak)), (Seconds(1.0), Bytes(0))];
    let report = RunReport {
        title: "A run".into(),
        facts: vec![Fact { label: "Device".into(), value: "host, 2 threads".into() }],
        headlines: vec![Headline {
            label: "Tokens".into(),
            value: "1,234".into(),
            note: "promised 1,300".into(),
        }],
        loss: vec![(1, 5.5), (2, 4.25), (3, f64::NAN), (4, 3.125)],
        unigram_entropy: Some(3.25),
        occupancy: vec![TierOccupancy {
            tier: Tier::Host,
            budget: Some(Bytes::from_mib(4)),
            promised: curve(3 << 20),
            measured: curve(2 << 20),
        }],
        ..RunReport::default()
    };
    let html = report.to_html();
    for wanted in [
        "<title>A run</title>",
        "<dt>Device</dt><dd>host, 2 threads</dd>",
        "1,234",
        "promised 1,300",
        "step 1: loss 5.500",
        "step 4: loss 3.125",
        "From 5.500 to 3.125 in 4 steps.",
        "not drawn: 1",
        "unigram entropy 3.250",
        "peak measured 2.000 MiB · promised 3.000 MiB · room 4.000 MiB",
    ] {
        assert!(html.contains(wanted), "{wanted}");
    }
    assert_sound(&html);
}

#[test]
fn lanes_add_up_their_bytes_and_busy_time_and_mark_waiting() {
    let report = RunReport {
        spans: vec![
            span("forward 0", Lane::Compute, 0.0, 0.25, 0),
            span("backward 0", Lane::Compute, 0.5, 1.0, 0),
            // Two requests in flight at once are busy once.
            span("boundary 0 d2h", Lane::D2h, 0.0, 0.5, 1 << 20),
            span("boundary 1 d2h", Lane::D2h, 0.25, 0.5, 3 << 20),
        ],
        ..RunReport::default()
    };
    let html = report.to_html();
    assert!(html.contains(">busy 75%<"), "compute");
    assert!(html.contains(">busy 50% · 4.000 MiB<"), "copies");
    assert!(html.contains("standing still: 250.0 ms at 250.0 ms"));
    assert!(html.contains("backward 0: 500.0 ms at 500.0 ms"));
    assert_sound(&html);
}

#[test]
fn hostile_text_stays_text() {
    let hostile = "</title><script>alert(\"1\")</script>&'\u{0}";
    let report = RunReport {
        title: hostile.into(),
        facts: vec![Fact { label: hostile.into(), value: hostile.into() }],
        headlines: vec![Headline { label: hostile.into(), value: hostile.into(), note: hostile.into() }],
        spans: vec![span(hostile, Lane::Compute, 0.0, 1.0, 1)],
        comparison: vec![compared(hostile, hostile, Some(1.0), Some(2.0))],
        ..RunReport::default()
    };
    let html = report.to_html();
    assert!(!html.contains("<script") && !html.contains('\u{0}'));
    assert!(html.contains("&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;&#39;"));
}

#[test]
fn empty_and_degenerate_runs_draw() {
    assert_sound(&RunReport::default().to_html());
    let nothing = |tier| TierOccupancy { tier, budget: None, promised: vec![], measured: vec![] };
    let still = |tier| TierOccupancy {
        tier,
        budget: Some(Bytes::ZERO),
        promised: vec![(Seconds::ZERO, Bytes::ZERO)],
        measured: vec![(Seconds(f64::NAN), Bytes(1)), (Seconds(1.0), Bytes(u64::MAX))],
    };
    let report = RunReport {
        loss: vec![(7, 2.5)],
        unigram_entropy: Some(2.5),
        placement: vec![Placement::Hbm],
        occupancy: vec![nothing(Tier::Hbm), still(Tier::Host), still(Tier::Nvme)],
        spans: vec![
            span("forward 0", Lane::Compute, 0.0, 0.0, 0),
            span("backwards in time", Lane::H2d, 2.0, 1.0, 0),
            span("never", Lane::H2d, f64::NAN, f64::INFINITY, u64::MAX),
        ],
        ..RunReport::default()
    };
    let html = report.to_html();
    assert!(html.contains("One step with loss 2.500."));
    assert_sound(&html);
    let lossless =
        RunReport { loss: vec![(1, f64::NAN)], unigram_entropy: Some(f64::NAN), ..RunReport::default() };
    assert!(lossless.to_html().contains("No step with a finite loss"));
    assert_sound(&lossless.to_html());
}

#[test]
fn a_step_of_a_hundred_thousand_spans_stays_small() {
    let spans = (0..100_000).map(|i| {
        let start = f64::from(i) * 1e-4;
        // Phases alternate within a lane: neighbours of one colour are rare.
        let name = if i / 6 % 2 == 0 { "forward 1" } else { "backward 1" };
        span(name, Lane::ALL[i as usize % 6], start, start + 5e-5, 1)
    });
    let report = RunReport {
        spans: spans.collect(),
        loss: (0..100_000).map(|i| (i, 3.0 + (i as f64).sin())).collect(),
        ..RunReport::default()
    };
    let html = report.to_html();
    for picture in html.split("<svg").skip(1) {
        assert!(picture.len() < 200_000, "{} bytes", picture.len());
    }
    assert_sound(&html);
}
