//! What layers took within whole steps, and the rates that links had there: the times of a profile, and its correction by a run.

use std::collections::VecDeque;

use crate::hardware::{HardwareProfile, Marked, StepTimes};
use crate::span::Lane;
use crate::step::{StepPlan, Task, Work};
use crate::timeline::Timeline;
use crate::units::{Bytes, BytesPerSecond, Seconds};

/// What one task of a plan took, pass after pass: of the last passes only, so that a long run takes no more memory than a short one.
#[derive(Clone, Debug)]
pub struct Observations {
    tasks: Vec<(Work, Lane)>,
    passes: VecDeque<Pass>,
    most: usize,
}

/// One pass over the plan.
#[derive(Clone, Debug)]
struct Pass {
    total: Seconds,
    /// In the plan's order.
    tasks: Vec<Seen>,
}

/// One task of a pass.
#[derive(Clone, Copy, Debug)]
struct Seen {
    took: Seconds,
    bytes: Bytes,
    /// For at least half of that time there was a copy in the other direction.
    both: bool,
}

impl Observations {
    /// Of the last `most` passes over `plan`.
    pub fn new(plan: &StepPlan, most: usize) -> Self {
        let tasks = plan.tasks().map(|task: &Task| (task.work, task.lane)).collect();
        Observations { tasks, passes: VecDeque::new(), most: most.max(1) }
    }

    /// Notes one measured pass; one with another number of spans is of another plan, and is passed over.
    pub fn note(&mut self, pass: &Timeline) {
        if pass.spans.len() != self.tasks.len() {
            return;
        }
        if self.passes.len() == self.most {
            self.passes.pop_front();
        }
        let start = pass.spans.first().map_or(Seconds::ZERO, |span| span.start);
        let seen = pass.spans.iter().map(|span| Seen {
            took: span.duration(),
            bytes: span.bytes,
            both: beside_the_other_way(pass, span.lane, span.start, span.end) >= 0.5,
        });
        self.passes.push_back(Pass { total: pass.total() - start, tasks: seen.collect() });
    }

    /// The times of a profile, for `layers` layers that are all alike: the mean of those that were seen stands for each, and a way in which
    /// none ran takes as long as the way nearest to it. `workload` says what they hold for; `by` and `when` are their origin.
    pub fn times(&self, workload: String, layers: usize, by: &str, when: &str) -> StepTimes {
        let saving = self.mean_ms(|work| matches!(work, Work::Forward { keep: true, .. }));
        let plain =
            |work| matches!(work, Work::Forward { keep: false, .. } | Work::Recompute { save: false, .. });
        let internals = self.mean_ms(|work| matches!(work, Work::Recompute { save: true, .. }));
        let forward = self.mean_ms(plain).or(saving).or(internals);
        let one = |ms: Option<f64>| Marked::measured(ms.unwrap_or_default(), by, when);
        let each = |ms: Option<f64>| Marked::measured(vec![ms.unwrap_or_default(); layers], by, when);
        StepTimes {
            workload,
            forward_ms: each(forward),
            saving_forward_ms: each(saving.or(forward)),
            internals_forward_ms: each(internals.or(forward)),
            backward_ms: each(self.mean_ms(|work| matches!(work, Work::Backward(_)))),
            prologue_ms: one(self.mean_ms(|work| work == Work::Prologue)),
            prologue_backward_ms: one(self.mean_ms(|work| work == Work::PrologueBackward)),
            epilogue_ms: one(self.mean_ms(|work| work == Work::Epilogue)),
        }
    }

    /// `profile` with what was seen in place of what it said. Of layers that never ran in one of the ways (without saving, keeping
    /// internals, for internals alone, backward) the time changes as that of the others does; a way in which no layer ran, and a link that moved nothing, stay as they were.
    /// `by` and `when` are the origin of what is new.
    pub fn correct(&self, profile: &HardwareProfile, by: &str, when: &str) -> HardwareProfile {
        let mut corrected = profile.clone();
        if let Some(times) = &mut corrected.times {
            self.correct_times(times, by, when);
        }
        let links = &mut corrected.links;
        let rate = |lane, both, entry: &mut Marked<BytesPerSecond>| {
            if let Some(rate) = self.rate(lane, both) {
                *entry = Marked::measured(rate, by, when);
            }
        };
        let separate = |both: bool, known: bool| known.then_some(both);
        for (lane, alone, both) in [
            (Lane::D2h, &mut links.d2h, &mut links.d2h_both),
            (Lane::H2d, &mut links.h2d, &mut links.h2d_both),
        ] {
            // Where the profile has one rate for both cases, all copies make it.
            rate(lane, separate(false, both.is_some()), alone);
            if let Some(both) = both {
                rate(lane, Some(true), both);
            }
        }
        rate(Lane::NvmeWrite, None, &mut links.nvme_write);
        rate(Lane::NvmeRead, None, &mut links.nvme_read);
        corrected
    }

    fn correct_times(&self, times: &mut StepTimes, by: &str, when: &str) {
        let forward = |work| match work {
            Work::Forward { layer, keep: false } | Work::Recompute { layer, save: false } => Some(layer.0),
            _ => None,
        };
        let saving = |work| match work {
            Work::Forward { layer, keep: true } => Some(layer.0),
            _ => None,
        };
        let internals = |work| match work {
            Work::Recompute { layer, save: true } => Some(layer.0),
            _ => None,
        };
        let backward = |work| match work {
            Work::Backward(layer) => Some(layer.0),
            _ => None,
        };
        let lists = [
            &mut times.forward_ms,
            &mut times.saving_forward_ms,
            &mut times.internals_forward_ms,
            &mut times.backward_ms,
        ];
        let ways: [fn(Work) -> Option<usize>; 4] = [forward, saving, internals, backward];
        for (list, layer_of) in lists.into_iter().zip(ways) {
            let seen: Vec<Option<f64>> = (0..list.value.len())
                .map(|layer| self.mean_ms(|work| layer_of(work) == Some(layer)))
                .collect();
            if let Some(values) = filled(&list.value, &seen) {
                *list = Marked::measured(values, by, when);
            }
        }
        for (entry, work) in [
            (&mut times.prologue_ms, Work::Prologue),
            (&mut times.prologue_backward_ms, Work::PrologueBackward),
            (&mut times.epilogue_ms, Work::Epilogue),
        ] {
            if let Some(ms) = self.mean_ms(|other| other == work) {
                *entry = Marked::measured(ms, by, when);
            }
        }
    }

    /// The passes that took neither very long nor very short: the middle half. Their mean tells what a usual step takes, and unlike medians
    /// of single tasks it adds up.
    fn usual(&self) -> impl Iterator<Item = &Pass> {
        let mut order: Vec<&Pass> = self.passes.iter().collect();
        order.sort_by(|a, b| a.total.get().total_cmp(&b.total.get()));
        let outer = order.len() / 4;
        let inner = order.len() - 2 * outer;
        order.into_iter().skip(outer).take(inner)
    }

    fn mean_ms(&self, wanted: impl Fn(Work) -> bool) -> Option<f64> {
        let (mut sum, mut count) = (0.0, 0usize);
        for pass in self.usual() {
            for (_, seen) in self.tasks.iter().zip(&pass.tasks).filter(|((work, _), _)| wanted(*work)) {
                (sum, count) = (sum + seen.took.as_ms(), count + 1);
            }
        }
        (count > 0).then(|| sum / count as f64)
    }

    /// Rate of a link: of all its copies, or of those beside which the other direction was busy or was not.
    fn rate(&self, lane: Lane, both: Option<bool>) -> Option<BytesPerSecond> {
        let (mut bytes, mut seconds) = (0.0, 0.0);
        for pass in self.usual() {
            let copies = self.tasks.iter().zip(&pass.tasks);
            let copies = copies.filter(|((work, of), _)| *work == Work::Copy && *of == lane);
            for (_, seen) in copies.filter(|(_, seen)| both.is_none_or(|both| seen.both == both)) {
                (bytes, seconds) = (bytes + seen.bytes.get() as f64, seconds + seen.took.get());
            }
        }
        (bytes > 0.0 && seconds > 0.0).then(|| BytesPerSecond(bytes / seconds))
    }
}

/// Share of the time from `start` to `end` in which the other direction of the link to the host was busy.
fn beside_the_other_way(pass: &Timeline, lane: Lane, start: Seconds, end: Seconds) -> f64 {
    let other = match lane {
        Lane::D2h => Lane::H2d,
        Lane::H2d => Lane::D2h,
        _ => return 0.0,
    };
    let of_other = pass.spans.iter().filter(|span| span.lane == other);
    let shared = of_other.map(|s| (s.end.get().min(end.get()) - s.start.get().max(start.get())).max(0.0));
    shared.sum::<f64>() / (end - start).get()
}

/// What was seen, and for layers that were not the known value times how much the others changed. Nothing where none was seen.
fn filled(known: &[f64], seen: &[Option<f64>]) -> Option<Vec<f64>> {
    let pairs = || known.iter().zip(seen).filter_map(|(known, seen)| Some((known, (*seen)?)));
    let (before, after) = pairs().fold((0.0, 0.0), |(b, a), (known, seen)| (b + known, a + seen));
    pairs().next()?;
    let change = if before > 0.0 { after / before } else { 1.0 };
    Some(known.iter().zip(seen).map(|(known, seen)| seen.unwrap_or(known * change)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::Links;
    use crate::schedule::Schedule;
    use crate::timeline::simulate;
    use crate::units::Placement;

    const WHEN: &str = "2026-11-30";

    fn profile(layers: usize, forward: f64, rate: f64) -> HardwareProfile {
        let one = |ms: f64| Marked::measured(ms, "probe", WHEN);
        let list = |ms: f64| Marked::measured(vec![ms; layers], "probe", WHEN);
        let link = || Marked::measured(BytesPerSecond(rate), "probe", WHEN);
        HardwareProfile {
            name: "test".into(),
            tiers: crate::hardware::Tiers::default(),
            links: Links::alone(link(), link(), link(), link()),
            drives: None,
            compute: None,
            times: Some(StepTimes {
                workload: "test".into(),
                forward_ms: list(forward),
                saving_forward_ms: list(1.5 * forward),
                internals_forward_ms: list(1.2 * forward),
                backward_ms: list(2.0 * forward),
                prologue_ms: one(1.0),
                prologue_backward_ms: one(1.0),
                epilogue_ms: one(4.0),
            }),
            optimizer_elements_per_s: None,
            optimizer_commit_share: None,
        }
    }

    fn plan(letters: &str, keep: &[bool]) -> StepPlan {
        let bytes = vec![Bytes(1_000_000); letters.len()];
        let mut schedule = Schedule::named("test", &bytes, false);
        schedule.placement = letters.chars().map(|c| Placement::from_letter(c).unwrap()).collect();
        schedule.keep = keep.to_vec();
        StepPlan::new(&schedule, &bytes).unwrap()
    }

    #[test]
    fn a_profile_becomes_that_of_the_machine_the_steps_ran_on() {
        let plan = plan("GC-GG", &[false, false, false, true]);
        let (assumed, real) = (profile(4, 10.0, 2e8), profile(4, 13.0, 1e8));
        let mut seen = Observations::new(&plan, 8);
        for slower in [1.0, 1.0, 7.0] {
            // A pass that something else held up is not a usual one.
            let costs = profile(4, 13.0 * slower, 1e8).costs().unwrap();
            (0..4).for_each(|_| seen.note(&simulate(&plan, &costs)));
        }
        // The window ends up with two slow passes among eight.
        for _ in 0..6 {
            seen.note(&simulate(&plan, &real.costs().unwrap()));
        }
        let corrected = seen.correct(&assumed, "steps", WHEN);
        let (times, wanted) = (corrected.times.unwrap(), real.times.unwrap());
        for (found, wanted) in [
            (&times.forward_ms, &wanted.forward_ms),
            (&times.saving_forward_ms, &wanted.saving_forward_ms),
            (&times.internals_forward_ms, &wanted.internals_forward_ms),
            (&times.backward_ms, &wanted.backward_ms),
        ] {
            assert_eq!(found.by, "steps");
            for (a, b) in found.value.iter().zip(&wanted.value) {
                assert!((a - b).abs() < 1e-9, "{a} {b}");
            }
        }
        for link in [&corrected.links.d2h, &corrected.links.h2d] {
            assert!((link.value.get() - 1e8).abs() < 1.0 && link.by == "steps", "{link:?}");
        }
        // Nothing went to NVMe.
        assert_eq!(corrected.links.nvme_read, assumed.links.nvme_read);
    }

    #[test]
    fn times_of_layers_that_are_alike_add_up_to_a_usual_pass() {
        let plan = plan("GGG-G", &[false, true, false, false]);
        // One layer takes longer than the others, and one pass of four was held up.
        let mut costs = profile(4, 10.0, 1e8).costs().unwrap();
        costs.backward[2] = Seconds::from_ms(28.0);
        let pass = simulate(&plan, &costs);
        let (mut held_up, thrice) = (pass.clone(), |at: Seconds| Seconds(3.0 * at.get()));
        held_up
            .spans
            .iter_mut()
            .for_each(|span| (span.start, span.end) = (thrice(span.start), thrice(span.end)));
        let mut seen = Observations::new(&plan, 8);
        for pass in [&pass, &held_up, &pass, &pass] {
            seen.note(pass);
        }
        let times = seen.times("test".into(), 4, "steps", WHEN);
        let near = |list: &[f64], wanted: f64| list.iter().all(|ms| (ms - wanted).abs() < 1e-9);
        assert!(near(&times.backward_ms.value, (3.0 * 20.0 + 28.0) / 4.0), "{:?}", times.backward_ms);
        assert!(near(&times.forward_ms.value, 10.0) && near(&times.saving_forward_ms.value, 15.0));
        assert!(near(&times.internals_forward_ms.value, 12.0) && near(&[times.epilogue_ms.value], 4.0));
        // What they promise of the plan is what it took.
        let mut again = profile(4, 1.0, 1e8);
        again.times = Some(times);
        let promised = simulate(&plan, &again.costs().unwrap()).total();
        assert!((promised - pass.total()).get().abs() < 1e-12);
    }

    #[test]
    fn a_way_in_which_no_layer_ran_takes_as_long_as_the_nearest() {
        let plan = plan("GG", &[true]);
        let mut seen = Observations::new(&plan, 4);
        seen.note(&simulate(&plan, &profile(1, 10.0, 1e8).costs().unwrap()));
        let times = seen.times("test".into(), 1, "steps", WHEN);
        for list in [&times.forward_ms, &times.saving_forward_ms, &times.internals_forward_ms] {
            assert!((list.value[0] - 15.0).abs() < 1e-9, "{list:?}");
        }
    }

    #[test]
    fn a_pass_of_another_plan_and_an_empty_record_change_nothing() {
        let (plan, other) = (plan("GCG", &[false; 2]), plan("GGG", &[false; 2]));
        let profile = profile(2, 10.0, 1e8);
        let mut seen = Observations::new(&plan, 4);
        seen.note(&simulate(&other, &profile.costs().unwrap()));
        assert_eq!(seen.correct(&profile, "steps", WHEN), profile);
    }

    #[test]
    fn a_way_in_which_some_layers_never_ran_changes_as_the_others_do() {
        assert_eq!(
            filled(&[10.0, 20.0, 30.0], &[Some(12.0), Some(24.0), None]),
            Some(vec![12.0, 24.0, 36.0])
        );
        assert_eq!(filled(&[10.0], &[None]), None);
    }

    #[test]
    fn copies_beside_the_other_direction_have_a_rate_of_their_own() {
        let plan = plan("CCCCG", &[false; 4]);
        let mut profile = profile(4, 1.0, 1e9);
        let link = |rate| Some(Marked::measured(BytesPerSecond(rate), "probe", WHEN));
        (profile.links.d2h_both, profile.links.h2d_both) = (link(1e9), link(1e9));
        let mut real = profile.clone();
        (real.links.d2h_both, real.links.h2d_both) = (link(5e8), link(5e8));
        let mut pass = simulate(&plan, &real.costs().unwrap());
        let mut seen = Observations::new(&plan, 4);
        seen.note(&pass);
        let alone = seen.correct(&profile, "steps", WHEN).links;
        assert!((alone.d2h.value.get() - 1e9).abs() < 10.0, "{:?}", alone.d2h);
        // Boundary 0 leaves while boundary 3 comes back.
        let at = |lane: Lane| pass.spans.iter().position(|span| span.lane == lane).unwrap();
        let (out, back) = (at(Lane::D2h), at(Lane::H2d));
        let (start, end) = (pass.spans[back].start, pass.spans[back].start + Seconds(0.002));
        for index in [out, back] {
            (pass.spans[index].start, pass.spans[index].end) = (start, end);
        }
        seen.note(&pass);
        let both = seen.correct(&profile, "steps", WHEN).links;
        assert!((both.d2h_both.unwrap().value.get() - 5e8).abs() < 10.0);
        assert!((both.d2h.value.get() - 1e9).abs() < 10.0);
    }
}
