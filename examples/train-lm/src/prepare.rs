//! What a run needs before it starts: flags, configuration and text, read and checked before anything is written; and the
//! machine's profile.

use std::path::{Path, PathBuf};

use lazy_model::{HardwareProfile, ModelSpec};
use lazy_optim_nvme::AdamOptions;
use lazy_store::cuda::{Gpu, device_count};
use lazy_store::scratch::RunDir;

use crate::backend::Backend;
use crate::console::Console;
use crate::cuda::{CudaDecoder, CudaOptions};
use crate::dataset::DataSet;
use crate::decoder::Decoder;
use crate::error::{Result, TrainError};
use crate::habits::Habits;
use crate::homes::WeightsHome;
use crate::model::HostModel;
use crate::planning::{adam_options, check_parameters, check_room};
use crate::probe::{probe, timestamp};
use crate::run_folder::{Remembered, RunFolder, check_free};
use crate::settings::{DeviceChoice, RunDevice, Settings, TrainArgs, UpdateChoice};
use crate::weights::{CheckpointWeights, InitialWeights};

/// The model that ships with the trainer.
const DEFAULT_CONFIG: &str = include_str!("../config.json");

/// Everything that is read and checked before anything is written.
pub(crate) struct Prepared {
    pub(crate) settings: Settings,
    pub(crate) habits: Habits,
    pub(crate) config: String,
    pub(crate) data: DataSet,
    pub(crate) backend: Backend,
    pub(crate) initial: InitialWeights,
    pub(crate) adam: AdamOptions,
    pub(crate) resumed: Option<RunFolder>,
    pub(crate) out: PathBuf,
    /// Steps in all.
    pub(crate) steps: Option<u64>,
    /// How many the run was told when it began.
    pub(crate) told: Option<u64>,
}

pub(crate) fn spill_folder(root: &Path) -> Result<RunDir> {
    RunDir::create(root).map_err(|e| {
        TrainError::Usage(format!("{e}; name a writable folder for spill files with --nvme-dir"))
    })
}

/// `name` in the folder that holds `path`.
pub(crate) fn beside(path: &Path, name: &str) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).join(name)
}

pub(crate) fn prepare(args: &TrainArgs, console: &Console) -> Result<Prepared> {
    let (resumed, Remembered { mut settings, habits, steps: told }, config) = match &args.resume {
        Some(run) => {
            let (folder, Remembered { mut settings, habits, steps }) = RunFolder::open(run)?;
            settings.check_unchanged(args)?;
            let habits = habits.with(&args.habits)?;
            let config = read(&folder.config())?;
            (settings.state_hbm, settings.state_host) =
                (args.state_hbm_gib.or(settings.state_hbm), args.state_host_gib.or(settings.state_host));
            (Some(folder), Remembered { settings, habits, steps }, config)
        }
        None => {
            let weights = weights_folder(args, console);
            let settings = Settings { weights, ..Settings::of(args, device_of(args.device))? };
            let habits = Habits::default().with(&args.habits)?;
            (None, Remembered { settings, habits, steps: args.steps }, model_config(args)?)
        }
    };
    settings.check()?;
    let gpu = open_device(args, &settings)?;
    let spec = ModelSpec::from_json(&config).map_err(|e| match &args.model {
        Some(path) => TrainError::from(e).advise(format!("it was read from {}", path.display())),
        None => e.into(),
    })?;
    for note in &spec.notes {
        console.note(note);
    }
    if let Some(longest) = spec.max_positions.filter(|longest| settings.seq > *longest) {
        console.note(&format!(
            "--seq {} is longer than the config's max_position_embeddings of {longest}: the model was not made for it",
            settings.seq
        ));
    }
    if gpu.is_none() {
        check_parameters(&spec)?;
    }
    let data = DataSet::read(args, &mut settings, &habits, (&spec, &config), resumed.as_ref(), console)?;
    let out = args.resume.clone().or_else(|| args.out.clone()).unwrap_or_else(default_out);
    if resumed.is_none() {
        check_free(&out)?;
    }
    let initial = initial_weights(&settings, &spec, resumed.is_some())?;
    let backend = backend(spec, gpu, &settings, args.weights)?;
    let parameters = backend.spec().total_parameters();
    let adam = AdamOptions {
        io: args.io.state(),
        ..adam_options(parameters, &settings, args.update, backend.device())
    };
    check_room(&backend, &settings, &adam, &args.budgets)?;
    let steps = args.steps.or(told);
    Ok(Prepared { settings, habits, config, data, backend, initial, adam, resumed, out, steps, told })
}

/// The device of a new run.
fn device_of(choice: DeviceChoice) -> RunDevice {
    match choice {
        DeviceChoice::Host => RunDevice::Host,
        DeviceChoice::Cuda => RunDevice::Cuda,
        DeviceChoice::Auto if device_count().is_ok_and(|count| count > 0) => RunDevice::Cuda,
        DeviceChoice::Auto => RunDevice::Host,
    }
}

/// The GPU of a run on one.
fn open_device(args: &TrainArgs, settings: &Settings) -> Result<Option<Gpu>> {
    let usage = |text: &str| Err(TrainError::Usage(text.into()));
    if args.resume.is_some() && args.device != DeviceChoice::Auto && device_of(args.device) != settings.device
    {
        return usage(
            "--device cannot be changed when a run is resumed, since its bits would: leave it out, or start a new run",
        );
    }
    if settings.device == RunDevice::Cuda {
        if args.debug_boundaries {
            return usage("--debug-boundaries is for the host device");
        }
        let opened = Gpu::open(0).map_err(|e| TrainError::Usage(format!("{e} (--device host)")));
        return opened.map(Some);
    }
    if args.update == UpdateChoice::Cuda {
        return usage("--update cuda needs --device cuda");
    }
    Ok(None)
}

fn backend(spec: ModelSpec, gpu: Option<Gpu>, settings: &Settings, weights: WeightsHome) -> Result<Backend> {
    let Some(gpu) = gpu else {
        // The optimizer's state sets its weights.
        let zeros = &mut |_: &str, shape: &[usize]| vec![0.0; shape.iter().product()];
        let decoder = match weights {
            WeightsHome::Hbm => Decoder::new(spec, zeros)?,
            WeightsHome::Host => Decoder::without_layers(spec, zeros)?,
        };
        return Ok(Backend::Host(HostModel::new(
            decoder,
            settings.shape(),
            settings.accum,
            settings.dropout,
        )));
    };
    let options = CudaOptions {
        shape: settings.shape(),
        real: settings.dtype,
        gradients: settings.grad_dtype,
        dropout: settings.dropout,
        model: weights.options(settings.accum),
        poison: false,
    };
    Ok(Backend::Cuda(CudaDecoder::new(&gpu, spec, options)?))
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(TrainError::io(path))
}

/// What `--model` names holds weights: a run starts from them unless it is told not to.
fn weights_folder(args: &TrainArgs, console: &Console) -> Option<PathBuf> {
    let folder = args.model.as_ref().filter(|path| path.is_dir())?;
    let shown = folder.display();
    let there = CheckpointWeights::lie_in(folder);
    match there && !args.random_weights {
        true => console.note(&format!("starting from the weights in {shown}")),
        false if there => console.note(&format!("starting from random weights, not from those in {shown}")),
        false => {
            console.note(&format!("{shown} holds no model.safetensors: starting from random weights"));
        }
    }
    (there && !args.random_weights).then(|| std::path::absolute(folder).unwrap_or_else(|_| folder.clone()))
}

/// The first weights. A resumed run has all of its weights in its state.
fn initial_weights(settings: &Settings, spec: &ModelSpec, resumed: bool) -> Result<InitialWeights> {
    match &settings.weights {
        Some(folder) if !resumed => match CheckpointWeights::open(folder, spec) {
            Err(TrainError::Usage(problem)) => {
                Err(TrainError::Usage(format!("{problem}; --random-weights starts from none")))
            }
            opened => Ok(InitialWeights::Checkpoint(opened?)),
        },
        _ => Ok(InitialWeights::Random { seed: settings.seed, layers: spec.layers() }),
    }
}

fn model_config(args: &TrainArgs) -> Result<String> {
    args.model.as_deref().map_or_else(|| Ok(DEFAULT_CONFIG.into()), read_config)
}

/// The configuration in a file, or in the folder that holds it.
pub(crate) fn read_config(path: &Path) -> Result<String> {
    let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    std::fs::read_to_string(&file).map_err(|source| {
        TrainError::Usage(format!(
            "--model {}: {source}; give a Hugging Face config.json or the folder that holds it",
            file.display()
        ))
    })
}

fn default_out() -> PathBuf {
    let base = Path::new("runs");
    let stamp = timestamp().replace(':', "");
    let mut out = base.join(&stamp);
    let mut number = 1;
    while out.exists() {
        number += 1;
        out = base.join(format!("{stamp}-{number}"));
    }
    out
}

/// Reads the profile, or measures one now.
pub(crate) fn profile_for(
    args: &TrainArgs,
    prepared: &Prepared,
    spill: &Path,
    console: &Console,
) -> Result<HardwareProfile> {
    match &args.budgets.profile {
        Some(path) => match std::fs::read_to_string(path) {
            Ok(text) => HardwareProfile::from_json(&text)
                .map_err(|e| TrainError::from(e).advise(format!("it was read from {}", path.display()))),
            Err(error) => Err(TrainError::Usage(format!(
                "--profile {}: {error}; give a file that `train-lm probe --write FILE` or an earlier run wrote",
                path.display()
            ))),
        },
        None => {
            console.say("measuring layers, links and optimizer");
            measure(args, prepared, spill)
        }
    }
}

/// The `probe` command: measures and returns the profile.
///
/// # Errors
/// As [`train`](crate::train::train).
pub fn probe_only(args: &TrainArgs) -> Result<HardwareProfile> {
    let console = Console::new(args.json);
    let prepared = prepare(args, &console)?;
    let root = args.nvme_dir.clone().unwrap_or_else(|| beside(&prepared.out, "spill"));
    let spill = spill_folder(&root)?;
    measure(args, &prepared, spill.path())
}

fn measure(args: &TrainArgs, prepared: &Prepared, spill: &Path) -> Result<HardwareProfile> {
    let links = (args.throttle.unwrap_or_default(), args.io);
    let advice = "drives are measured in the folder of spill files: --nvme-dir names another folder";
    probe(&prepared.backend, &prepared.settings, spill, links, &prepared.adam)
        .map_err(|e| e.advise_if_full(advice))
}
