//! The store's side: extents of one size between the host tier and NVMe.

use std::path::{Path, PathBuf};
use std::sync::mpsc;

use lazy_store::{
    BackendChoice, Bytes, Checksum, DirectChoice, Extent, Lane, NvmeOptions, Store, StoreError, StoreOptions,
    Submission, Tier,
};

use crate::Outcome;
use crate::side::{Sample, Side, Transfer};

/// The most host memory that transfers take turns in.
pub(crate) const HOST: u64 = 256 << 20;

/// How a store is opened.
pub(crate) struct Way {
    pub(crate) label: &'static str,
    pub(crate) backend: BackendChoice,
    pub(crate) checksum: Checksum,
    /// Folders of spill files, below the given one.
    pub(crate) dirs: usize,
}

impl Way {
    pub(crate) const URING: Way =
        Way { label: "io_uring", backend: BackendChoice::Uring, checksum: Checksum::Off, dirs: 1 };
    pub(crate) const POSIX: Way = Way { label: "posix", backend: BackendChoice::Posix, ..Way::URING };
    pub(crate) const CHECKSUM: Way = Way { label: "checksum on", checksum: Checksum::Crc32c, ..Way::URING };
    pub(crate) const TWO_DIRS: Way = Way { label: "two folders", dirs: 2, ..Way::URING };

    fn open(&self, dir: &Path, bytes: u64) -> Outcome<Store> {
        let dirs: Vec<PathBuf> = (0..self.dirs).map(|i| dir.join(format!("drive-{i}"))).collect();
        let mut nvme = NvmeOptions::new(dir, Bytes(bytes));
        nvme.dirs = dirs;
        (nvme.backend, nvme.checksum, nvme.direct) = (self.backend, self.checksum, DirectChoice::Required);
        let host = Bytes(bytes.min(HOST));
        Store::open(StoreOptions { host, nvme: Some(nvme), ..StoreOptions::default() })
            .map_err(|error| format!("{}: {error}", self.label))
    }
}

/// A store whose NVMe tier is full of extents of one size.
pub(crate) struct Ours {
    label: &'static str,
    store: Store,
    nvme: Vec<Extent>,
    /// Each NVMe extent has its place here; where there are fewer, they are used in turn.
    host: Vec<Extent>,
}

impl Ours {
    /// Opens a store of `bytes`, writes every extent, so that no block of the file is met for the first time later, and
    /// makes sure that they read back as they were written.
    pub(crate) fn open(way: &Way, dir: &Path, bytes: u64, extent: u64) -> Outcome<Ours> {
        let store = way.open(dir, bytes)?;
        let reserve = |tier, total: u64| {
            let extents = (0..total / extent).map(|_| store.reserve(tier, Bytes(extent)));
            extents.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())
        };
        let (nvme, host) = (reserve(Tier::Nvme, bytes)?, reserve(Tier::Host, bytes.min(HOST))?);
        let mut ours = Ours { label: way.label, store, nvme, host };
        ours.fill_host(true)?;
        ours.run(Transfer::Write)?;
        ours.fill_host(false)?;
        ours.run(Transfer::Read)?;
        ours.check_host()?;
        Ok(ours)
    }

    /// What was obtained, in words.
    pub(crate) fn mode(&self) -> String {
        self.store.nvme_mode().map_or_else(String::new, ToString::to_string)
    }

    /// Fills the host extents with numbers that no drive can compress, or with zeros.
    fn fill_host(&self, random: bool) -> Outcome<()> {
        for (seed, extent) in self.host.iter().enumerate() {
            let task = Submission { writes: &[extent], ..Submission::new(Lane::Compute, "fill") };
            let fill = move |access: &mut lazy_store::Access<'_>| {
                match random {
                    true => crate::fill(access.write(0), seed as u64),
                    false => access.write(0).fill(0),
                }
                Ok(())
            };
            self.store.submit(task, fill).map_err(|error| error.to_string())?;
        }
        self.store.synchronize().map_err(|error| error.to_string())
    }

    fn check_host(&self) -> Outcome<()> {
        let (sender, receiver) = mpsc::channel();
        for (seed, extent) in self.host.iter().enumerate() {
            let task = Submission { reads: &[extent], ..Submission::new(Lane::Compute, "check") };
            let sender = sender.clone();
            let check = move |access: &mut lazy_store::Access<'_>| {
                let mut wanted = vec![0; access.read(0).len()];
                crate::fill(&mut wanted, seed as u64);
                Ok(sender.send(access.read(0) == wanted)?)
            };
            self.store.submit(task, check).map_err(|error| error.to_string())?;
        }
        drop(sender);
        self.store.synchronize().map_err(|error| error.to_string())?;
        if receiver.iter().all(|same| same) {
            return Ok(());
        }
        Err(format!("{}: an extent did not read back as it was written", self.label))
    }

    fn submit(&self, transfer: Transfer) -> Result<(), StoreError> {
        for (i, nvme) in self.nvme.iter().enumerate() {
            let host = &self.host[i % self.host.len()];
            match transfer {
                Transfer::Write => self.store.copy("write", host, nvme, &[])?,
                Transfer::Read => self.store.copy("read", nvme, host, &[])?,
                Transfer::Both if i % 2 == 0 => self.store.copy("write", host, nvme, &[])?,
                Transfer::Both => self.store.copy("read", nvme, host, &[])?,
            };
        }
        self.store.synchronize()
    }
}

impl Side for Ours {
    fn label(&self, _transfer: Transfer) -> String {
        self.label.to_owned()
    }

    fn run(&mut self, transfer: Transfer) -> Outcome<Sample> {
        let bytes = self.nvme.iter().map(|extent| extent.bytes().get()).sum();
        Sample::of(bytes, || self.submit(transfer).map_err(|error| format!("{}: {error}", self.label)))
    }
}
