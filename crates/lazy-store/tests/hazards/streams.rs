//! What is particular to a device with streams, on a simulated one.

use std::sync::Arc;

use lazy_store::fault::Faults;
use lazy_store::{Access, BoxError, Bytes, Lane, QueueOrder, Routine, StoreError, Submission, Tier};

use crate::{On, folder, store};

#[test]
fn a_task_that_cannot_be_issued_leaves_what_depends_on_it_unwritten() {
    let dir = folder();
    for seed in 0..50 {
        let store = store(dir.path(), On::Streams, QueueOrder::Seeded(seed), 0, &Faults::new(0));
        let (x, y) =
            (store.reserve(Tier::Hbm, Bytes(64)).unwrap(), store.reserve(Tier::Host, Bytes(64)).unwrap());
        let task = Submission { writes: &[&x], ..Submission::new(Lane::Compute, "refused") };
        store.launch(task, |_| Err("no such kernel".into())).unwrap();
        store.copy("out", &x, &y, &[]).unwrap();
        let error = store.synchronize().unwrap_err();
        assert!(matches!(&error, StoreError::Task { task, .. } if task == "refused"), "{error}");
        assert!(!x.is_written() && !y.is_written());
        // The store goes on.
        let task = Submission { writes: &[&x], ..Submission::new(Lane::Compute, "fill") };
        store
            .compute(task, |access| {
                access.write(0).fill(7);
                Ok(())
            })
            .unwrap();
        store.copy("out", &x, &y, &[]).unwrap();
        let task = Submission { reads: &[&y], ..Submission::new(Lane::Optimizer, "read") };
        store
            .submit(task, |access| if access.read(0) == [7; 64] { Ok(()) } else { Err("wrong bytes".into()) })
            .unwrap();
        store.synchronize().unwrap();
    }
}

#[test]
fn the_cpu_is_not_given_the_memory_of_a_device_and_streams_are_not_offered_without_one() {
    let dir = folder();
    let beside = store(dir.path(), On::Streams, QueueOrder::Seeded(0), 0, &Faults::new(0));
    let x = beside.reserve(Tier::Hbm, Bytes(64)).unwrap();
    let task = Submission { writes: &[&x], ..Submission::new(Lane::Compute, "on the CPU") };
    assert!(matches!(beside.submit(task, |_| Ok(())), Err(StoreError::NotInMemory { tier: Tier::Hbm, .. })));
    let host = store(dir.path(), On::Host, QueueOrder::Seeded(0), 0, &Faults::new(0));
    let error = host.launch(Submission::new(Lane::Compute, "kernel"), |_| Ok(())).unwrap_err();
    assert!(error.to_string().contains("submit a task"), "{error}");
}

#[test]
fn what_is_put_in_any_tier_is_got_from_any_other() {
    let dir = folder();
    for on in [On::Host, On::Streams] {
        let store = store(dir.path(), on, QueueOrder::Seeded(3), 0, &Faults::new(0));
        for from in Tier::ALL {
            for to in Tier::ALL.into_iter().filter(|&to| to != from) {
                for len in [0, 1, 511, 4096, 4097] {
                    let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
                    let first = store.put("put", from, bytes.clone()).unwrap();
                    assert_eq!(store.get(&first).unwrap(), bytes, "{from}, {len} bytes");
                    let second = store.prefetch("prefetch", &first, to).unwrap();
                    store.release(first);
                    assert_eq!(store.get(&second).unwrap(), bytes, "{from} to {to}, {len} bytes");
                }
            }
        }
        let unwritten = store.reserve(Tier::Host, Bytes(64)).unwrap();
        assert!(matches!(store.get(&unwritten), Err(StoreError::NotWritten { .. })));
        store.submit(Submission::new(Lane::Compute, "bad"), |_| Err("on purpose".into())).unwrap();
        let written = store.put("put", Tier::Host, vec![1; 64]).unwrap();
        let error = store.get(&written).unwrap_err();
        assert!(error.to_string().contains("on purpose"), "{error}");
        store.synchronize().unwrap();
    }
}

/// Adds its item to every byte, on the CPU.
struct Add;

impl Routine for Add {
    fn run(&self, item: usize, access: &mut Access<'_>) -> Result<(), BoxError> {
        access.write(0).iter_mut().for_each(|byte| *byte += item as u8);
        Ok(())
    }
}

#[test]
fn a_routine_runs_once_for_each_item_and_says_so_where_it_has_no_work_for_a_stream() {
    let dir = folder();
    let routine: Arc<dyn Routine> = Arc::new(Add);
    for on in [On::Host, On::Streams] {
        let store = store(dir.path(), on, QueueOrder::Seeded(0), 0, &Faults::new(0));
        let x = store.put("zeros", Tier::Host, vec![0; 64]).unwrap();
        for item in [3, 4, 5] {
            let task = Submission { reads: &[&x], writes: &[&x], ..Submission::new(Lane::Compute, "add") };
            store.submit_routine(task, &routine, item).unwrap();
        }
        match (on, store.synchronize()) {
            (On::Host, Ok(())) => assert_eq!(store.get(&x).unwrap(), [12; 64]),
            (On::Streams, Err(StoreError::Task { source, .. })) => {
                assert!(source.downcast_ref().is_some_and(|e| matches!(e, StoreError::Device { .. })));
                assert!(!x.is_written());
            }
            (_, other) => panic!("{other:?}"),
        }
    }
    assert_eq!(Arc::strong_count(&routine), 1, "what ran is given back");
}
