//! What a person sees while a run goes on: all of it on standard error.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lazy_model::{Placement, StepProblem, Tier, TierBytes};
use lazy_store::NvmeMode;

use crate::error::{Result, TrainError};
use crate::evaluation::Evaluation;
use crate::metrics::StepMetrics;
use crate::planning::Chosen;
use crate::run_folder::RunFolder;
use crate::train::Summary;

/// Where there is no terminal, a line is written every so many steps.
const QUIET_INTERVAL: u64 = 20;

/// Writes a line to standard error. A run must not die because whoever read its log has gone, so a failure is passed over.
pub fn tell(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Writes a result to standard output. A reader that has seen enough, as `head` does, is no failure.
///
/// # Errors
/// When it cannot be written.
pub fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(TrainError::io(Path::new("standard output"))),
    }
}

/// The terminal, or a log.
pub struct Console {
    bar: ProgressBar,
    terminal: bool,
    /// Words in colour: a terminal, and `NO_COLOR` unset or empty.
    colours: bool,
    json: bool,
}

const YELLOW: &str = "\x1b[33m";
const BOLD: &str = "\x1b[1m";
const PLAIN: &str = "\x1b[0m";

impl Console {
    /// With `json`, standard output is left to the one object that the program writes at the end.
    pub fn new(json: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let colours = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Console { bar: ProgressBar::hidden(), terminal, colours, json }
    }

    fn line(&self, text: &str) {
        if self.bar.is_hidden() { tell(text) } else { self.bar.println(text) }
    }

    fn painted(&self, colour: &str, text: &str) -> String {
        if self.colours { format!("{colour}{text}{PLAIN}") } else { text.to_owned() }
    }

    /// What is being done.
    pub fn say(&self, text: &str) {
        self.line(text);
    }

    /// Something to know.
    pub fn note(&self, text: &str) {
        self.line(&format!("{} {text}", self.painted(BOLD, "note:")));
    }

    /// Says how files are read and written where that is less than the best.
    pub fn less_than_the_best(&self, files: &str, mode: &NvmeMode) {
        if !mode.fallbacks.is_empty() {
            self.note(&format!("{files}: {mode}"));
        }
    }

    /// Something to look after.
    pub fn warn(&self, text: &str) {
        self.line(&format!("{} {text}", self.painted(YELLOW, "warning:")));
    }

    /// The plan and its promises.
    pub fn plan(&self, problem: &StepProblem, chosen: &Chosen) {
        let (schedule, promise) = (&chosen.schedule, &chosen.verified.promise);
        let solve = &schedule.solve;
        self.line(&match solve.objective_ms {
            Some(ms) => format!(
                "plan: {} by {} in {} ({}, objective {ms:.5} ms)",
                solve.method, solve.solver, solve.solve_s, solve.status
            ),
            None => format!("plan: {}", solve.method),
        });
        self.line(&format!("  boundaries  {}", schedule.placement_letters()));
        let legend = [Placement::Hbm, Placement::Host, Placement::Nvme, Placement::Recompute]
            .map(|p| format!("{} {p}", p.letter()));
        self.line(&format!("              {}", legend.join(", ")));
        for tier in Tier::ALL {
            let (peak, budget) = (promise.peak_bytes.get(tier), chosen.budgets.get(tier));
            let fixed = problem.always().get(tier);
            self.line(&format!("  {tier:<4}        {peak} of {budget}, {fixed} of it fixed"));
        }
        self.line(&format!(
            "  promised    {} a step: forward {}, backward {}, optimizer {}, exposed {}",
            promise.step_s,
            promise.forward_s,
            promise.backward_s,
            promise.optimizer_s,
            promise.exposed_s.total()
        ));
    }

    /// What an evaluation came to.
    pub fn evaluation(&self, e: &Evaluation) {
        self.line(&format!(
            "evaluation after {} steps: loss {:.4}, perplexity {:.2} over {} tokens",
            e.step, e.loss, e.perplexity, e.tokens
        ));
    }

    /// Starts the progress bar.
    pub fn begin(&mut self, first: u64, steps: u64) {
        if !self.terminal {
            return;
        }
        self.bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        if let Ok(style) =
            ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} [{elapsed} elapsed, {eta} left]")
        {
            self.bar.set_style(style);
        }
        self.bar.set_position(first);
    }

    /// One step is done.
    pub fn step(&self, metrics: &StepMetrics, budgets: &TierBytes) {
        let used = Tier::ALL
            .map(|t| {
                let (peak, budget) = (metrics.peak_bytes.get(t).as_mib(), budgets.get(t).as_mib());
                format!("{t} {peak:.1}/{budget:.1}")
            })
            .join(" ");
        let skipped = if metrics.skipped { " (skipped: gradient not finite)" } else { "" };
        let text =
            format!("loss {:.4}{skipped}, {:.0} tok/s, {used} MiB", metrics.loss, metrics.tokens_per_s);
        if self.terminal {
            self.bar.set_position(metrics.step + 1);
            self.bar.set_message(text);
        } else if metrics.step.is_multiple_of(QUIET_INTERVAL) {
            tell(&format!("step {}: {text}", metrics.step));
        }
    }

    /// Removes the progress bar.
    pub fn end(&mut self) {
        self.bar.finish_and_clear();
        self.bar = ProgressBar::hidden();
    }

    /// What the run came to, and what would help most.
    pub fn summary(&self, s: &Summary, next: Option<&str>, folder: &RunFolder) {
        if self.json {
            return;
        }
        let number = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "-".to_owned(), |v| format!("{v:.digits$}"))
        };
        self.line(&format!(
            "{} steps: loss {} at first, {} over the last {}; knowing only how often each token occurs gives {:.4}",
            s.steps,
            number(s.loss_first.map(f64::from), 4),
            number(s.loss_last_20, 4),
            s.steps.min(20),
            s.unigram_entropy
        ));
        let measured = match (s.measured_step_s, s.tokens_per_s) {
            (Some(step), Some(tokens)) => format!("{step:.4} s measured (median), {tokens:.0} tokens/s"),
            _ => "too few steps to measure one".into(),
        };
        self.line(&format!("step: {:.4} s promised, {measured}", s.predicted_step_s));
        self.line(&format!(
            "spill: {} (--io {}); digest of the weights {}",
            s.nvme_mode,
            s.io,
            &s.weights_digest[..16.min(s.weights_digest.len())]
        ));
        if let Some(next) = next {
            self.line(&format!("next: {next}"));
        }
        self.line(&format!("report: {}", folder.report().display()));
    }
}
