//! A run from flags to report.

mod advance;
mod state;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use lazy_model::perfetto::TraceWriter;
use lazy_model::{Bytes, HardwareProfile, Schedule, Seconds, Span, StepProblem, Tier};
use lazy_optim_nvme::{NvmeAdam, StepOutcome, generations};
use lazy_runtime::{Executor, ExecutorOptions, Program, Step, StepReport};
use lazy_store::Store;
use lazy_store::scratch::RunDir;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use self::advance::{Advanced, Finals};
use self::state::{check_save, open_state, state_dir};
use crate::backend::{Backend, Trained};
use crate::boundaries::BoundaryLog;
use crate::console::Console;
use crate::cuda::nvml::Watch;
use crate::data::Place;
use crate::dataset::DataSet;
use crate::error::{Result, TrainError};
use crate::evaluation::{Evaluation, Evaluator};
use crate::habits::Habits;
use crate::homes::WeightsHome;
use crate::io::IoChoice;
use crate::metrics::{LaneBytes, LaneSeconds, StepMetrics, StepSeconds, resident_bytes};
use crate::noted::Noted;
use crate::planning::{Chosen, check_plan, choose, optimized, problem};
use crate::prepare::{Prepared, beside, prepare, profile_for, spill_folder};
use crate::probe::{median, optimizer_time};
use crate::report::{self, Measured, Record};
use crate::run_folder::{MetricsWriter, Remembered, RunFolder, write_file};
use crate::saves::Saves;
use crate::settings::{DurabilityChoice, Settings, TrainArgs};
use crate::stop;

/// Steps of a run that is not told how many.
const DEFAULT_STEPS: u64 = 125;
/// Learning-rate groups: matrices, and vectors, which are not decayed.
const GROUPS: usize = 2;

/// What `--json` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Summary {
    /// Steps done in all, earlier processes of a resumed run included.
    pub steps: u64,
    /// Loss of the first step of the run.
    pub loss_first: Option<f32>,
    /// Loss of the last step.
    pub loss_last: Option<f32>,
    /// Mean loss of the last 20 steps.
    pub loss_last_20: Option<f64>,
    /// Entropy of single predicted tokens of the data, in nats.
    pub unigram_entropy: f64,
    /// Median over the steps of this process from the third on.
    pub tokens_per_s: Option<f64>,
    /// What the plan promised a step takes.
    pub predicted_step_s: f64,
    /// Median over the steps of this process from the third on.
    pub measured_step_s: Option<f64>,
    /// Most bytes in HBM, declared sizes included.
    pub hbm_peak_bytes: Bytes,
    /// Most bytes taken of the GPU while it trained, as its monitor (NVML) saw them, the context not counted.
    pub gpu_peak_bytes: Option<Bytes>,
    /// Most bytes in host RAM.
    pub host_peak_bytes: Bytes,
    /// Most bytes on NVMe, the optimizer's state not counted.
    pub nvme_peak_bytes: Bytes,
    /// The cap on HBM.
    pub hbm_budget_bytes: Bytes,
    /// Boundaries by placement, layers by keeping.
    pub counts: lazy_model::Counts,
    /// Where weights and gradients of layers were between their uses.
    #[serde(default)]
    pub weights_home: WeightsHome,
    /// What was asked for to move bytes to and from drives.
    #[serde(default)]
    pub io: IoChoice,
    /// How spill files are written; `none` where there are none.
    pub nvme_mode: String,
    /// How the optimizer's files are written.
    #[serde(default)]
    pub state_mode: String,
    /// SHA-256 over the bytes of all weights in the order of their names.
    pub weights_digest: String,
    /// The first evaluation of the run, where there was one.
    pub evaluation_first: Option<Evaluation>,
    /// The last one.
    pub evaluation_last: Option<Evaluation>,
    /// Somebody asked for the run to stop before its last step.
    pub interrupted: bool,
    /// The run's folder.
    pub run: PathBuf,
}

/// Trains as the flags say.
///
/// # Errors
/// [`TrainError`]; the last committed step stays on disk.
pub fn train(args: &TrainArgs) -> Result<Summary> {
    let console = Console::new(args.json);
    let prepared = prepare(args, &console)?;
    let spill_root = args.nvme_dir.clone().unwrap_or_else(|| beside(&prepared.out, "spill"));
    let spill = spill_folder(&spill_root)?;
    if lazy_store::is_tmpfs(&spill_root)? {
        console.warn(&format!(
            "{} lies in memory (tmpfs): what is spilled there saves no RAM; name a folder on a drive with --nvme-dir",
            spill_root.display()
        ));
    }
    let (profile, problem, chosen) = plan(args, &prepared, spill.path(), &console)?;
    let mut run = Run::start(args, prepared, (profile, problem), chosen, spill, console)?;
    run.finish().map_err(|error| match run.goes_on() {
        Some(advice) => error.advise(advice),
        None => error,
    })
}

/// From flags to a plan that was said. Measures with files in `spill` where no profile is given.
fn plan(
    args: &TrainArgs,
    prepared: &Prepared,
    spill: &Path,
    console: &Console,
) -> Result<(HardwareProfile, StepProblem, Chosen)> {
    check_plan(&args.plan)?;
    let profile = profile_for(args, prepared, spill, console)?;
    let Prepared { backend, settings, adam, .. } = prepared;
    let state = state_dir(settings, &prepared.out);
    let new_state = prepared.resumed.is_none().then_some(state.as_path());
    let problem = problem(backend, settings, &profile, adam, args, spill, new_state)?;
    let chosen = choose(&problem, &args.plan, args.prefetch)?;
    console.plan(&problem, &chosen);
    Ok((profile, problem, chosen))
}

/// Says what [`train`] would carry out, and leaves nothing behind.
///
/// # Errors
/// As [`train`].
pub fn plan_only(args: &TrainArgs) -> Result<Schedule> {
    let console = Console::new(args.json);
    let prepared = prepare(args, &console)?;
    let root = args.nvme_dir.clone().unwrap_or_else(|| beside(&prepared.out, "spill"));
    let made: Vec<PathBuf> =
        root.ancestors().take_while(|dir| !dir.exists()).map(Path::to_path_buf).collect();
    let planned = spill_folder(&root).and_then(|spill| plan(args, &prepared, spill.path(), &console));
    for dir in made.iter().filter(|dir| !dir.as_os_str().is_empty()) {
        // Innermost first; where another process has put something there meanwhile, it stays.
        let _ = std::fs::remove_dir(dir);
    }
    Ok(planned?.2.schedule)
}

/// A run under way.
struct Run<'a> {
    args: &'a TrainArgs,
    settings: Settings,
    habits: Habits,
    data: DataSet,
    trained: Trained,
    profile: HardwareProfile,
    problem: StepProblem,
    chosen: Chosen,
    folder: RunFolder,
    executor: Executor,
    program: Program,
    /// Shared with the task that runs a step over parameters at home in RAM.
    optimizer: Arc<Mutex<NvmeAdam>>,
    evaluator: Option<Evaluator>,
    saves: Saves,
    /// Where the optimizer runs beside backward.
    finals: Option<Finals>,
    boundaries: Option<BoundaryLog>,
    console: Console,
    /// Lines of earlier processes and of this one.
    metrics: Vec<StepMetrics>,
    /// First step of this process.
    first: u64,
    /// Steps in all.
    steps: u64,
    /// The step after the last one done.
    next: u64,
    /// The last step's passes, and the spans of its optimizer.
    last: Option<(StepReport, Vec<Span>)>,
    noted: Noted,
    record: Record,
    interrupted: bool,
    /// Sees what is taken of the GPU until the last step is done.
    watch: Option<Watch>,
    gpu_peak: Option<Bytes>,
    // Dropped last: the store's spill file lies in it.
    _spill: RunDir,
}

impl<'a> Run<'a> {
    fn start(
        args: &'a TrainArgs,
        prepared: Prepared,
        (profile, problem): (HardwareProfile, StepProblem),
        chosen: Chosen,
        spill: RunDir,
        console: Console,
    ) -> Result<Run<'a>> {
        stop::check()?;
        let Prepared {
            settings,
            habits,
            config,
            mut data,
            backend,
            initial,
            adam,
            resumed,
            out,
            steps,
            told,
        } = prepared;
        let new = resumed.is_none();
        let remembered = Remembered { settings, habits, steps: told };
        let mut folder = match resumed {
            Some(folder) => folder,
            None => RunFolder::create(&out, &remembered, &config, data.tokens.json())?,
        };
        folder.remember(&remembered)?;
        let Remembered { settings, habits, .. } = remembered;
        let watch = backend.gpu().map(Watch::start);
        let device = backend.in_words();
        let store = open_store(&backend, &chosen, &spill, args)?;
        if let Some(mode) = store.nvme_mode() {
            console.less_than_the_best("spill files", mode);
        }
        let checked = ExecutorOptions { check_recompute: args.debug_boundaries };
        let mut executor = Executor::new(store, backend.model()?, checked)?;
        let finals = Finals::of(&settings, &mut executor);
        let trained = backend.attach(&executor)?;
        let program = executor.prepare(chosen.verified.plan.clone())?;
        if new && !args.habits.no_save {
            check_save(&state_dir(&settings, folder.path()), &optimized(trained.spec(), &settings), &adam)?;
        }
        let initial = new.then_some(&initial);
        let (mut optimizer, cursor) =
            open_state(&settings, &folder, (&trained, &executor), &adam, initial, &chosen.schedule)?;
        if args.no_load_optim {
            optimizer.forget_moments()?;
            console.note("the optimizer's moments are zero again");
        }
        console.less_than_the_best("files of the optimizer", optimizer.mode());
        let first = cursor.next_step;
        let steps = steps.unwrap_or(DEFAULT_STEPS.max(first));
        if first < steps {
            // The files that a save holds are not written again.
            let advice = "what was saved last stays until the next save is made";
            optimizer.reserve().map_err(|e| TrainError::from(e).advise_if_full(advice))?;
        }
        folder.started();
        let schedule = chosen.schedule.to_json()?;
        write_file(&folder.schedule(), schedule.as_bytes())?;
        let noted = Noted::new(&chosen.verified.plan);
        let entropy = data.train.unigram_entropy();
        let record = Record::new(trained.spec(), device, first, entropy, &problem, &chosen);
        record.write(folder.path())?;
        write_file(&folder.profile(), profile.to_json().as_bytes())?;
        let metrics = folder.read_metrics(cursor.next_step)?;
        let evaluator = match data.evaluation.take() {
            Some(corpus) => Some(Evaluator::open(corpus, habits.eval_every, &executor, &folder, first)?),
            None => None,
        };
        let saves = Saves::new(&state_dir(&settings, folder.path()), habits.keep);
        let boundaries = match args.debug_boundaries {
            true => Some(BoundaryLog::create(&folder.boundaries(), &chosen.verified.plan)?),
            false => None,
        };
        if boundaries.is_some() && chosen.verified.plan.extents.nvme == Bytes::ZERO {
            console.warn(
                "--debug-boundaries: this plan spills nothing to NVMe, so boundaries.jsonl stays empty",
            );
        }
        Ok(Run {
            args,
            settings,
            habits,
            data,
            trained,
            profile,
            problem,
            chosen,
            folder,
            executor,
            program,
            optimizer: Arc::new(Mutex::new(optimizer)),
            evaluator,
            saves,
            finals,
            boundaries,
            console,
            metrics,
            first,
            steps,
            next: first,
            last: None,
            noted,
            record,
            interrupted: false,
            watch,
            gpu_peak: None,
            _spill: spill,
        })
    }

    /// The remaining steps, then everything that is written at the end.
    fn finish(&mut self) -> Result<Summary> {
        let steps = self.steps;
        let mut writer = self.folder.metrics_writer(&self.metrics)?;
        let mut trace = TraceWriter::new(self.folder.trace_writer()?, "train-lm")
            .map_err(TrainError::io(&self.folder.trace()))?;
        let began = Instant::now();
        if self.first >= steps {
            self.console.note(&format!(
                "all {steps} steps were done before: --steps with more than {} goes on",
                self.first
            ));
        }
        self.console.begin(self.first, steps);
        self.evaluate(steps == self.first)?;
        for step in self.first..steps {
            if stop::asked() {
                self.interrupted = true;
                self.console.note("interrupted: the last step is committed, --resume continues the run");
                break;
            }
            self.step(step, began, &mut writer, &mut trace)?;
            self.next = step + 1;
            self.after_step()?;
        }
        self.console.end();
        let skipped = self.metrics.iter().filter(|m| m.skipped).count();
        if skipped > 0 {
            self.console.warn(&format!(
                "{skipped} of {} steps changed nothing, since a gradient was not finite: a smaller --lr may help",
                self.metrics.len()
            ));
        }
        self.gpu_peak = self.watch.take().and_then(|mut watch| watch.most());
        self.save_state()?;
        trace.finish().and_then(|mut w| w.flush()).map_err(TrainError::io(&self.folder.trace()))?;
        if !self.args.habits.no_save {
            crate::export::checkpoint(&self.trained, &self.executor, &self.folder)?;
        }
        let summary = self.summary()?;
        self.record_measured(&summary)?;
        report::draw(self.folder.path())?;
        let advice = self.record.measured.as_ref().and_then(|m| m.advice.first());
        self.console.summary(&summary, advice.map(String::as_str), &self.folder);
        Ok(summary)
    }

    /// What to do once it has failed, where there is something to go on from.
    fn goes_on(&self) -> Option<String> {
        let state = state_dir(&self.settings, self.folder.path());
        let kept = match self.settings.durability {
            DurabilityChoice::Step => "every committed step is kept",
            DurabilityChoice::Checkpoint if generations(&state).ok()?.is_empty() => return None,
            DurabilityChoice::Checkpoint => "what was saved is kept",
        };
        Some(format!("{kept}: --resume {} goes on there", self.folder.path().display()))
    }

    /// What is done between steps.
    fn after_step(&mut self) -> Result<()> {
        self.saves.look_after(&mut lock(&self.optimizer))?;
        let every = self.habits.save_every;
        if every > 0 && self.next.is_multiple_of(every) && !self.args.habits.no_save {
            self.saves.begin(&mut lock(&self.optimizer), self.next)?;
        }
        self.evaluate(self.next == self.steps)
    }

    /// Evaluates the weights as they are, if that is due.
    fn evaluate(&mut self, last: bool) -> Result<()> {
        let Run { evaluator, executor, settings, trained, next, console, .. } = self;
        let Some(evaluator) = evaluator.as_mut().filter(|evaluator| evaluator.is_due(*next, last)) else {
            return Ok(());
        };
        let call = |batches| Ok(Step { seed: settings.seed, step: *next, inputs: trained.inputs(batches)? });
        if let Some(line) = evaluator.run(executor, *next, settings, call)? {
            console.evaluation(&line);
        }
        Ok(())
    }

    /// Saves the optimizer's state where steps do not, to resume from.
    fn save_state(&mut self) -> Result<()> {
        if self.settings.durability == DurabilityChoice::Checkpoint && !self.args.habits.no_save {
            self.saves.begin(&mut lock(&self.optimizer), self.next)?;
        }
        self.saves.finish(&mut lock(&self.optimizer))
    }

    fn step(
        &mut self,
        step: u64,
        began: Instant,
        writer: &mut MetricsWriter,
        trace: &mut TraceWriter<impl Write>,
    ) -> Result<()> {
        let start = Instant::now();
        let settings = &self.settings;
        let place = Place { seed: settings.seed, step, accum: settings.accum, batch: settings.batch };
        let inputs = self.data.train.step(place);
        let origin = Instant::now();
        let Advanced { passes, outcome, after } = self.advance(step, inputs, origin)?;
        // In a fixed order: the same sum for every schedule.
        let loss = passes.losses.iter().sum();
        let zero = Instant::now();
        self.trained.zero_gradients();
        let zero_grad = Seconds(zero.elapsed().as_secs_f64());
        let total = Seconds(start.elapsed().as_secs_f64());

        let spans: Vec<&Span> = passes.timeline.spans.iter().chain(&outcome.spans).collect();
        let metrics = self.measure(step, loss, [total, zero_grad, after], &passes, &outcome, &spans);
        // First of what is written: the step is committed, so this line belongs to the run.
        writer.write(&metrics)?;
        if step - self.first < self.args.trace_steps {
            let offset = Seconds(origin.duration_since(began).as_secs_f64());
            let owned: Vec<Span> = spans.into_iter().cloned().collect();
            trace.step(step, offset, &owned).map_err(TrainError::io(&self.folder.trace()))?;
        }
        self.console.step(&metrics, &self.chosen.budgets);
        if let Some(warning) = &outcome.warning {
            self.console.warn(warning);
        }
        self.metrics.push(metrics);
        self.noted.note(&passes);
        self.last = Some((passes, outcome.spans));
        Ok(())
    }

    fn measure(
        &self,
        step: u64,
        loss: f32,
        [total, zero_grad, optimizer]: [Seconds; 3],
        passes: &StepReport,
        outcome: &StepOutcome,
        spans: &[&Span],
    ) -> StepMetrics {
        let tokens = self.settings.tokens() as f64;
        let seconds = StepSeconds {
            step: total,
            forward: passes.forward,
            backward: passes.backward,
            recompute: passes.recompute,
            clip: outcome.seconds.norm,
            optimizer,
            zero_grad,
        };
        let flops = self.trained.spec().flops_per_token_6n() * tokens;
        StepMetrics {
            step,
            loss,
            grad_norm: outcome.grad_norm.is_finite().then_some(outcome.grad_norm),
            skipped: outcome.skipped,
            lr: self.settings.lr_at(step),
            seconds,
            tokens_per_s: tokens / total.get(),
            tflops: flops / total.get() / 1e12,
            bytes: LaneBytes::of(spans.iter().copied()),
            exposed_s: passes.exposed,
            busy_s: LaneSeconds::of(&passes.timeline.spans),
            peak_bytes: self.peaks(),
            rss_bytes: resident_bytes(),
        }
    }

    /// Measured extents of the store beside the sizes that are declared.
    fn peaks(&self) -> lazy_model::TierBytes {
        let store = self.executor.store();
        let mut peaks = self.problem.fixed;
        for tier in Tier::ALL {
            *peaks.get_mut(tier) += store.peak(tier);
        }
        // What the executor holds throughout is among the sizes that are declared.
        peaks.hbm = peaks.hbm.saturating_sub(self.executor.model().resident());
        peaks
    }

    fn evaluations(&self) -> &[Evaluation] {
        self.evaluator.as_ref().map_or(&[], Evaluator::lines)
    }

    fn summary(&self) -> Result<Summary> {
        let evaluations = self.evaluations();
        let own: Vec<&StepMetrics> = self.metrics.iter().filter(|m| m.step >= self.first).collect();
        let settled: Vec<f64> = own.iter().skip(2).map(|m| m.seconds.step.get()).collect();
        let measured = (!settled.is_empty()).then(|| median(settled));
        let peak = |tier: Tier| own.iter().map(|m| m.peak_bytes.get(tier)).max().unwrap_or_default();
        let last_20: Vec<f64> = self.metrics.iter().rev().take(20).map(|m| f64::from(m.loss)).collect();
        let store = self.executor.store();
        Ok(Summary {
            steps: self.next,
            loss_first: self.metrics.first().map(|m| m.loss),
            loss_last: self.metrics.last().map(|m| m.loss),
            loss_last_20: (!last_20.is_empty()).then(|| last_20.iter().sum::<f64>() / last_20.len() as f64),
            unigram_entropy: self.data.train.unigram_entropy(),
            tokens_per_s: measured.map(|s| self.settings.tokens() as f64 / s),
            predicted_step_s: self.chosen.verified.promise.step_s.get(),
            measured_step_s: measured,
            hbm_peak_bytes: peak(Tier::Hbm),
            gpu_peak_bytes: self.gpu_peak,
            host_peak_bytes: peak(Tier::Host),
            nvme_peak_bytes: peak(Tier::Nvme),
            hbm_budget_bytes: self.chosen.budgets.hbm,
            counts: self.chosen.schedule.counts(),
            weights_home: self.args.weights,
            io: self.args.io,
            state_mode: lock(&self.optimizer).mode().to_string(),
            nvme_mode: store.nvme_mode().map_or_else(|| "none".into(), ToString::to_string),
            weights_digest: digest(&self.trained, &self.executor)?,
            evaluation_first: evaluations.first().cloned(),
            evaluation_last: evaluations.last().cloned(),
            interrupted: self.interrupted,
            run: self.folder.path().to_owned(),
        })
    }

    /// Writes down what the run measured, and the profile corrected by it.
    fn record_measured(&mut self, summary: &Summary) -> Result<()> {
        let own: Vec<&StepMetrics> = self.metrics.iter().filter(|m| m.step > self.first).collect();
        let parameters = self.trained.spec().total_parameters();
        let beside = self.problem.beside_backward.is_some();
        let mut advice = Vec::new();
        if let Some(corrected) = self.noted.correct(&self.profile, &own, (!beside).then_some(parameters)) {
            write_file(&self.folder.corrected_profile(), corrected.to_json().as_bytes())?;
            if let (Some(costs), false) = (corrected.costs(), self.interrupted) {
                let share = self.problem.beside_backward.map(|beside| beside.bucket_share);
                let (optimizer, beside_backward) = optimizer_time(&corrected, parameters, share);
                let budgets = self.chosen.budgets;
                let problem =
                    StepProblem { costs, optimizer, beside_backward, budgets, ..self.problem.clone() };
                advice = crate::advice::advice(&problem, &self.chosen.schedule);
            }
        }
        let last = self.last.as_ref().map(|(passes, optimizer)| (passes, &optimizer[..]));
        let measured = Measured::of(summary.clone(), &self.noted, last, &self.chosen, advice);
        self.record.measured = Some(measured);
        self.record.write(self.folder.path())
    }
}

fn open_store(backend: &Backend, chosen: &Chosen, spill: &RunDir, args: &TrainArgs) -> Result<Store> {
    // What the plan needs are the budgets: the store refuses whatever the plan did not promise.
    let mut options = backend.model()?.store_options(&chosen.verified.plan, spill.path());
    options.device = backend.device();
    options.poison = args.debug_boundaries;
    if let Some(nvme) = &mut options.nvme {
        nvme.backend = args.io.spill();
        nvme.debug_boundaries = args.debug_boundaries;
    }
    options.limits = args.throttle.unwrap_or_default();
    let advice = "--nvme-dir names another folder for spill files, --nvme-mib caps what lies there";
    Store::open(options).map_err(|e| TrainError::from(e).advise_if_full(advice))
}

/// A step that panicked in the optimizer ends the run; until then what is behind the lock is whole.
fn lock(optimizer: &Mutex<NvmeAdam>) -> MutexGuard<'_, NvmeAdam> {
    optimizer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// SHA-256 over the bytes of all weights in the order of their names.
fn digest(trained: &Trained, executor: &Executor) -> Result<String> {
    let parameters = trained.spec().parameters();
    let mut order: Vec<usize> = (0..parameters.len()).collect();
    order.sort_by(|&a, &b| parameters[a].name.cmp(&parameters[b].name));
    let mut hasher = Sha256::new();
    for index in order {
        hasher.update(trained.read(executor, index)?);
    }
    Ok(hasher.finalize().iter().map(|b| format!("{b:02x}")).collect())
}
