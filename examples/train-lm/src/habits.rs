//! What a run does beside its steps. None of it changes a bit of the weights, so a process that resumes a run may do otherwise.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};
use crate::settings::absolute;

/// Flags of it.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Evaluation and saves")]
pub struct HabitArgs {
    /// Data to evaluate on: files or folders, read as --text is; before the first step, at every --eval-every and at the end
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub eval_text: Vec<PathBuf>,
    /// Steps from one evaluation to the next [default: 100]
    #[arg(long, value_name = "N")]
    pub eval_every: Option<u64>,
    /// Steps from one saved generation of the optimizer's state to the next; 0: none but the last one of a run with --durability checkpoint
    /// [default: 0]
    #[arg(long, value_name = "N")]
    pub save_every: Option<u64>,
    /// Saved generations that are kept, the newest [default: 1]
    #[arg(long, value_name = "K")]
    pub keep: Option<usize>,
    /// Save nothing, also at the end: neither generations nor the trained weights
    #[arg(long, conflicts_with_all = ["save_every", "keep"])]
    pub no_save: bool,
}

/// What is remembered of it in `run.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Habits {
    /// Data to evaluate on; empty: none.
    pub eval_text: Vec<PathBuf>,
    /// Steps between evaluations, at least 1.
    pub eval_every: u64,
    /// Steps between saves; 0 for none.
    pub save_every: u64,
    /// Generations kept, at least 1.
    pub keep: usize,
}

impl Default for Habits {
    fn default() -> Self {
        Habits { eval_text: Vec::new(), eval_every: 100, save_every: 0, keep: 1 }
    }
}

impl Habits {
    /// These, with what the flags say otherwise.
    ///
    /// # Errors
    /// When a value makes no sense.
    pub fn with(self, args: &HabitArgs) -> Result<Habits> {
        let eval_text = if args.eval_text.is_empty() { self.eval_text } else { absolute(&args.eval_text) };
        let habits = Habits {
            eval_text,
            eval_every: args.eval_every.unwrap_or(self.eval_every),
            save_every: args.save_every.unwrap_or(self.save_every),
            keep: args.keep.unwrap_or(self.keep),
        };
        let wrong = |flag: &str, want: &str| Err(TrainError::Usage(format!("{flag}: give {want}")));
        match &habits {
            h if h.eval_every == 0 => wrong("--eval-every", "a number of steps, 1 or more"),
            h if h.keep == 0 => wrong("--keep", "a number of generations, 1 or more; --no-save saves none"),
            h if args.eval_every.is_some() && h.eval_text.is_empty() => {
                wrong("--eval-every", "the data to evaluate on too, with --eval-text")
            }
            _ => Ok(habits),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_may_change_what_the_last_one_did() {
        let first = HabitArgs {
            eval_text: vec!["/a".into()],
            eval_every: Some(5),
            keep: Some(3),
            ..HabitArgs::default()
        };
        let habits = Habits::default().with(&first).unwrap();
        assert_eq!((habits.eval_every, habits.save_every, habits.keep), (5, 0, 3));
        let next = HabitArgs { save_every: Some(7), ..HabitArgs::default() };
        assert_eq!(habits.clone().with(&next).unwrap(), Habits { save_every: 7, ..habits });
    }

    #[test]
    fn senseless_values_are_refused_by_flag() {
        for (args, flag) in [
            (HabitArgs { eval_every: Some(0), ..HabitArgs::default() }, "--eval-every"),
            (HabitArgs { eval_every: Some(1), ..HabitArgs::default() }, "--eval-every"),
            (HabitArgs { keep: Some(0), ..HabitArgs::default() }, "--keep"),
        ] {
            assert!(Habits::default().with(&args).unwrap_err().to_string().starts_with(flag));
        }
    }
}
