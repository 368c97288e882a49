//! Transfers of one NVMe lane that are under way at once, on threads: a later one that uses the same bytes does not overtake.
//!
//! The first request is told to try again, so that without the wait the second one would be done first.

use std::sync::mpsc;

use lazy_store::fault::{Fault, Faults};
use lazy_store::{
    BackendChoice, Bytes, DirectChoice, Event, Extent, Lane, NvmeOptions, Store, StoreOptions, Submission,
    Tier,
};

use crate::folder;

const LEN: Bytes = Bytes(1 << 16);

/// A store whose spill file holds `nvme` extents, for each back end.
fn on_each_back_end(nvme: u64, check: impl Fn(&Store, &Faults)) {
    for backend in [BackendChoice::Uring, BackendChoice::Posix] {
        let (dir, faults) = (folder(), Faults::new(1));
        let bytes = Bytes(nvme * LEN.get());
        let nvme = NvmeOptions { backend, direct: DirectChoice::Off, ..NvmeOptions::new(dir.path(), bytes) };
        let options = StoreOptions { host: Bytes(4 << 20), nvme: Some(nvme), ..StoreOptions::default() };
        let store = Store::open_with_faults(options, &faults).unwrap();
        // Told to try again, and late and in another order besides.
        for reorder in [false, true] {
            if reorder {
                faults.reorder();
            }
            for _ in 0..20 {
                check(&store, &faults);
            }
        }
    }
}

fn reserve(store: &Store, tier: Tier) -> Extent {
    store.reserve(tier, LEN).unwrap()
}

/// An extent of host RAM full of `byte`.
fn full_of(store: &Store, byte: u8) -> Extent {
    let extent = reserve(store, Tier::Host);
    let fill = Submission { writes: &[&extent], ..Submission::new(Lane::Compute, "fill") };
    let filled = store.submit(fill, move |access| {
        access.write(0).fill(byte);
        Ok(())
    });
    filled.unwrap();
    extent
}

/// A task that ends when it is told to: what is queued after it is queued whole before any of it starts.
fn gate(store: &Store) -> (Event, mpsc::Sender<()>) {
    let (open, opened) = mpsc::channel();
    let task = Submission::new(Lane::Optimizer, "gate");
    (store.submit(task, move |_| Ok(opened.recv()?)).unwrap(), open)
}

fn holds(store: &Store, extent: &Extent, byte: u8) {
    let check = Submission { reads: &[extent], ..Submission::new(Lane::Compute, "compare") };
    let compare = move |access: &mut lazy_store::Access<'_>| match access.read(0).iter().find(|&&b| b != byte)
    {
        None => Ok(()),
        Some(other) => Err(format!("{other} in place of {byte}").into()),
    };
    store.submit(check, compare).unwrap();
    store.synchronize().unwrap();
}

#[test]
fn of_two_writes_to_one_extent_the_later_one_stays() {
    on_each_back_end(1, |store, faults| {
        let [a, b] = [1, 2].map(|byte| full_of(store, byte));
        let (x, c) = (reserve(store, Tier::Nvme), reserve(store, Tier::Host));
        let (closed, open) = gate(store);
        faults.on_write(0, Fault::Again);
        store.copy("a out", &a, &x, std::slice::from_ref(&closed)).unwrap();
        store.copy("b out", &b, &x, &[closed]).unwrap();
        store.copy("in", &x, &c, &[]).unwrap();
        open.send(()).unwrap();
        holds(store, &c, 2);
    });
}

#[test]
fn of_two_reads_into_one_range_of_host_ram_the_later_one_stays() {
    on_each_back_end(2, |store, faults| {
        let [a, b] = [1, 2].map(|byte| full_of(store, byte));
        let [x, y] = [(); 2].map(|()| reserve(store, Tier::Nvme));
        store.copy("a out", &a, &x, &[]).unwrap();
        store.copy("b out", &b, &y, &[]).unwrap();
        store.synchronize().unwrap();
        let c = reserve(store, Tier::Host);
        let (closed, open) = gate(store);
        faults.on_read(0, Fault::Again);
        store.copy("a in", &x, &c, std::slice::from_ref(&closed)).unwrap();
        store.copy("b in", &y, &c, &[closed]).unwrap();
        open.send(()).unwrap();
        holds(store, &c, 2);
    });
}

#[test]
fn a_range_of_the_spill_file_holds_what_its_last_owner_wrote() {
    on_each_back_end(1, |store, faults| {
        let [a, b] = [1, 2].map(|byte| full_of(store, byte));
        let (closed, open) = gate(store);
        faults.on_write(0, Fault::Again);
        let x = reserve(store, Tier::Nvme);
        store.copy("a out", &a, &x, std::slice::from_ref(&closed)).unwrap();
        drop(x);
        // The only room there is.
        let y = reserve(store, Tier::Nvme);
        store.copy("b out", &b, &y, &[closed]).unwrap();
        let c = reserve(store, Tier::Host);
        store.copy("in", &y, &c, &[]).unwrap();
        open.send(()).unwrap();
        holds(store, &c, 2);
    });
}
