//! The tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::{CudaSlice, DevicePtr};
use lazy_store::cuda::kernels::{Arg, Grid, Module};
use lazy_store::cuda::{DeviceMemory, Gpu};
use lazy_store::gpu_test::Test;
use lazy_store::{
    BackendChoice, BoxError, Bytes, Checksum, DeviceChoice, DeviceRange, Lane, LinkLimits, NvmeOptions,
    QueueOrder, Store, StoreError, StoreOptions, Stream, Submission, Tier,
};

use crate::{Context, check, fill, programs, spin, word};

pub(crate) const ALL: &[(&str, Test<Context>)] = &[
    ("copies of all sizes come back", copies),
    ("r1_r2_t1 random programs with slow streams and poison", random_programs),
    ("r1 leaving the waits between streams out is found", without_waits),
    ("a caller's slice is spilled, freed and brought back", slices),
    ("a caller's raw memory is put and filled in the order of its stream", raw_memory),
    ("HBM to NVMe and back through staging, every back end", staged),
    ("t14 a byte changed on the drive is found, every back end", flipped),
    ("spans have the times of the streams", spans),
    ("t17 more than there is, and a failed pin, are typed errors and leave the GPU usable", too_much),
    ("t17 a copy across two pinned parts", across_parts),
    ("the links' rates are measured, and nothing is copied where there is nothing", probed),
    ("a stream that is being captured is refused", capturing),
    ("what a GPU cannot do is refused by name", refusals),
    ("a task that fails is reported and the store goes on", failing_task),
    ("t18 every thread of the store uses its own GPU", contexts),
    ("stores come and go without leaving memory", no_leak),
    ("a kernel's fault is a typed error, and the store ends", kernel_fault),
];

fn gpu_store(hbm: u64, host: u64) -> Result<Store, StoreError> {
    Store::open(StoreOptions {
        device: DeviceChoice::Cuda { ordinal: 0 },
        hbm: Bytes(hbm),
        host: Bytes(host),
        ..StoreOptions::default()
    })
}

fn expect(held: bool, what: impl Into<String>) -> Result<(), BoxError> {
    if held { Ok(()) } else { Err(what.into().into()) }
}

/// Fills a host extent with what `tag` stands for, odd last bytes included.
fn fill_host(store: &Store, extent: &lazy_store::Extent, tag: u32) -> Result<(), StoreError> {
    let task = Submission { writes: &[extent], ..Submission::new(Lane::Compute, "fill") };
    store.submit(task, move |access| {
        for (i, out) in access.write(0).chunks_mut(4).enumerate() {
            out.copy_from_slice(&word(tag, i as u32).to_le_bytes()[..out.len()]);
        }
        Ok(())
    })?;
    Ok(())
}

/// Counts differing bytes of a host extent.
fn differing(store: &Store, extent: &lazy_store::Extent, tag: u32) -> Result<u64, BoxError> {
    let count = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&count);
    let task = Submission { reads: &[extent], ..Submission::new(Lane::Compute, "compare") };
    store.submit(task, move |access| {
        for (i, bytes) in access.read(0).chunks(4).enumerate() {
            if *bytes != word(tag, i as u32).to_le_bytes()[..bytes.len()] {
                seen.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    })?;
    store.synchronize()?;
    Ok(count.load(Ordering::Relaxed))
}

fn copies(_: &Context) -> Result<String, BoxError> {
    let store = gpu_store(300 << 20, 600 << 20)?;
    for (i, bytes) in [1, 5, 511, 513, 4095, 4097, 28_824_000, 256 << 20].into_iter().enumerate() {
        let (from, to) = (store.reserve(Tier::Host, Bytes(bytes))?, store.reserve(Tier::Host, Bytes(bytes))?);
        let hbm = store.reserve(Tier::Hbm, Bytes(bytes))?;
        fill_host(&store, &from, i as u32)?;
        store.copy("in", &from, &hbm, &[])?;
        store.copy("out", &hbm, &to, &[])?;
        let wrong = differing(&store, &to, i as u32)?;
        expect(wrong == 0, format!("{wrong} words of {bytes} bytes differ"))?;
    }
    Ok(String::new())
}

fn random_programs(context: &Context) -> Result<String, BoxError> {
    let store = programs::open(context, 4 << 20, 4 << 20)?;
    let (mut copies, mut checks) = (0, 0);
    for seed in 0..context.seeds {
        let counts = programs::run(context, &store, seed, 60)?;
        expect(counts.errors == 0, format!("seed {seed}: {} wrong words", counts.errors))?;
        expect(Tier::ALL.iter().all(|&t| store.live(t) == Bytes::ZERO), format!("seed {seed}: live bytes"))?;
        copies += counts.copies;
        checks += counts.checks;
    }
    Ok(format!("{} seeds, {copies} copies, {checks} checks", context.seeds))
}

fn without_waits(context: &Context) -> Result<String, BoxError> {
    let store = programs::open(context, 4 << 20, 4 << 20)?;
    store.leave_out_stream_waits(true);
    for seed in 0..context.seeds {
        let counts = programs::run(context, &store, seed, 60)?;
        if counts.errors > 0 {
            return Ok(format!("seed {seed}: {} wrong words", counts.errors));
        }
    }
    Err("no seed noticed that".into())
}

fn range_of<T>(slice: &CudaSlice<T>) -> DeviceRange {
    let (address, _) = slice.device_ptr(slice.stream());
    DeviceRange { address, bytes: Bytes((slice.len() * size_of::<T>()) as u64) }
}

fn slices(context: &Context) -> Result<String, BoxError> {
    let store = gpu_store(32 << 20, 64 << 20)?;
    let own = context.gpu.context().new_stream()?;
    // SAFETY: the stream lives to the end of this function.
    let stream = unsafe { Stream::from_raw(own.cu_stream().cast()) };
    let errors = own.alloc_zeros::<u32>(1)?;
    for round in 0..20_u32 {
        let tier = if round % 2 == 0 { Tier::Host } else { Tier::Hbm };
        let slice = own.alloc_zeros::<f32>(4 << 20)?;
        let bytes = range_of(&slice).bytes;
        // The contents appear late: the copy has to wait for the caller's stream.
        spin(&context.spin, stream, 2000)?;
        fill(&context.fill, stream, range_of(&slice), round)?;
        let spilled = store.reserve(tier, bytes)?;
        store.put_slice("spill", slice, &spilled).map_err(StoreError::from)?;
        // The freed memory is likely to come back here, and is overwritten at once.
        let other = own.alloc_zeros::<f32>(4 << 20)?;
        fill(&context.fill, stream, range_of(&other), 12345)?;
        // And the copy back arrives late: the caller's stream has to wait for it.
        let kernel = context.spin.clone();
        store.launch(Submission::new(Lane::H2d, "spin"), move |cx| spin(&kernel, cx.stream(), 2000))?;
        let back = store.get_slice("fill", &spilled, other).map_err(StoreError::from)?.ordered()?;
        check(&context.check, stream, range_of(&back), round, range_of(&errors))?;
    }
    let wrong = own.clone_dtoh(&errors)?[0];
    expect(wrong == 0, format!("{wrong} words differ"))?;
    store.synchronize()?;
    let refused =
        store.put_slice("wrong length", own.alloc_zeros::<f32>(7)?, &store.reserve(Tier::Host, Bytes(8))?);
    let refused = refused.err().ok_or("a wrong length was taken")?;
    expect(matches!(refused.error, StoreError::CopyLength { .. }), "another error")?;
    expect(refused.slice.is_some_and(|slice| slice.len() == 7), "the slice was not given back")?;
    Ok(String::new())
}

fn raw_memory(context: &Context) -> Result<String, BoxError> {
    let store = gpu_store(1 << 20, 64 << 20)?;
    let own = context.gpu.context().new_stream()?;
    // SAFETY: the stream lives to the end of this function.
    let stream = unsafe { Stream::from_raw(own.cu_stream().cast()) };
    let (slice, errors) = (own.alloc_zeros::<u32>(4 << 20)?, own.alloc_zeros::<u32>(1)?);
    let range = range_of(&slice);
    // SAFETY: the slice lives to the end, and its stream waits for each copy before it uses it again.
    let memory = unsafe { DeviceMemory::new(range.address, range.bytes, stream) };
    let saved = store.reserve(Tier::Host, range.bytes)?;
    for tag in 0..20 {
        spin(&context.spin, stream, 1000)?;
        fill(&context.fill, stream, range, tag)?;
        let put = store.put_memory("put", &memory, &saved)?;
        store.order(&put, stream)?;
        fill(&context.fill, stream, range, 999)?;
        let got = store.get_memory("get", &saved, &memory)?;
        store.order(&got, stream)?;
        check(&context.check, stream, range, tag, range_of(&errors))?;
    }
    let wrong = own.clone_dtoh(&errors)?[0];
    expect(wrong == 0, format!("{wrong} words differ"))?;
    // SAFETY: never used.
    let default = unsafe { DeviceMemory::new(range.address, range.bytes, Stream::from_raw(2 as *mut _)) };
    let refused = store.put_memory("per-thread stream", &default, &saved);
    expect(matches!(refused, Err(StoreError::Device { .. })), "the per-thread stream was taken")?;
    store.synchronize()?;
    Ok(String::new())
}

/// A store that spills over one back end, or why there is none.
fn spilling(
    context: &Context,
    backend: BackendChoice,
    checksum: Checksum,
) -> Result<Result<Store, String>, BoxError> {
    let dir = context.dir.join("spill");
    let nvme = NvmeOptions {
        staging: Bytes(32 << 20),
        backend,
        checksum,
        ..NvmeOptions::new(dir, Bytes(512 << 20))
    };
    let options = StoreOptions {
        device: DeviceChoice::Cuda { ordinal: 0 },
        hbm: Bytes(320 << 20),
        host: Bytes(400 << 20),
        nvme: Some(nvme),
        poison: true,
        ..StoreOptions::default()
    };
    match Store::open(options) {
        Err(error @ StoreError::BackendRefused { .. }) => Ok(Err(error.to_string())),
        other => Ok(Ok(other?)),
    }
}

const BACKENDS: [BackendChoice; 3] = [BackendChoice::Uring, BackendChoice::Posix, BackendChoice::Cufile];

fn staged(context: &Context) -> Result<String, BoxError> {
    let mut said = Vec::new();
    for (backend, checksum) in
        BACKENDS.into_iter().flat_map(|b| [Checksum::Off, Checksum::Crc32c].map(|c| (b, c)))
    {
        let store = match spilling(context, backend, checksum)? {
            Ok(store) => store,
            Err(why) => {
                said.push(why);
                continue;
            }
        };
        for (i, bytes) in [1, 513, 4097, (1 << 20) + 4, 28_824_000, 100 << 20].into_iter().enumerate() {
            let host = store.reserve(Tier::Host, Bytes(bytes))?;
            let (hbm, back) =
                (store.reserve(Tier::Hbm, Bytes(bytes))?, store.reserve(Tier::Hbm, Bytes(bytes))?);
            let nvme = store.reserve(Tier::Nvme, Bytes(bytes))?;
            fill_host(&store, &host, i as u32)?;
            store.copy("in", &host, &hbm, &[])?;
            store.copy("spill", &hbm, &nvme, &[])?;
            drop(hbm);
            // Checksums made on one side are compared on the other.
            let by_cpu = store.prefetch("by way of the CPU", &nvme, Tier::Host)?;
            let wrong = differing(&store, &by_cpu, i as u32)?;
            expect(wrong == 0, format!("{wrong} words of {bytes} bytes differ on the host"))?;
            store.copy("spill again", &by_cpu, &nvme, &[])?;
            store.copy("bring back", &nvme, &back, &[])?;
            store.copy("out", &back, &host, &[])?;
            let wrong = differing(&store, &host, i as u32)?;
            expect(wrong == 0, format!("{wrong} words of {bytes} bytes differ"))?;
        }
        if checksum == Checksum::Off {
            said.push(store.nvme_mode().map_or_else(String::new, ToString::to_string));
        }
    }
    Ok(said.join("; "))
}

fn flipped(context: &Context) -> Result<String, BoxError> {
    use std::os::unix::fs::FileExt as _;
    let mut said = Vec::new();
    for backend in BACKENDS {
        let Ok(store) = spilling(context, backend, Checksum::Crc32c)? else { continue };
        let hbm = store.put("put", Tier::Hbm, vec![7; 5 << 20])?;
        let nvme = store.prefetch("spill", &hbm, Tier::Nvme)?;
        store.synchronize()?;
        let file = std::fs::read_dir(context.dir.join("spill"))?.next().ok_or("no spill file")??.path();
        let file = std::fs::OpenOptions::new().write(true).open(file)?;
        file.write_all_at(&[6], nvme.offset() + (3 << 20) + 5)?;
        file.sync_all()?;
        store.copy("bring back", &nvme, &hbm, &[])?;
        let error =
            store.synchronize().err().ok_or(format!("{backend:?}: a changed byte was not noticed"))?;
        let text = format!("{error}");
        let found = std::iter::successors(Some(&error as &dyn std::error::Error), |e| e.source())
            .any(|e| e.downcast_ref::<StoreError>().is_some_and(|e| matches!(e, StoreError::Corrupt { .. })));
        expect(found, text.clone())?;
        expect(!hbm.is_written(), "wrong bytes count as written")?;
        said.push(format!("{backend:?}: {text}"));
    }
    Ok(said.join("; "))
}

fn spans(context: &Context) -> Result<String, BoxError> {
    let store = gpu_store(1 << 20, 1 << 20)?;
    let x = store.reserve(Tier::Hbm, Bytes(4096))?;
    for _ in 0..2 {
        store.start_step();
        let (kernel, slow) = (context.fill.clone(), context.spin.clone());
        let task = Submission { writes: &[&x], ..Submission::new(Lane::Compute, "slow fill") };
        store.launch(task, move |cx| {
            spin(&slow, cx.stream(), 20_000)?;
            fill(&kernel, cx.stream(), cx.write(0), 1)
        })?;
        let kernel = context.spin.clone();
        store.launch(Submission::new(Lane::H2d, "beside"), move |cx| spin(&kernel, cx.stream(), 10_000))?;
        let y = store.reserve(Tier::Host, Bytes(4096))?;
        store.copy("out", &x, &y, &[])?;
        store.synchronize()?;
    }
    let spans = store.take_spans();
    expect(spans.len() == 3, format!("{} spans", spans.len()))?;
    let seconds = |i: usize| spans[i].end.get() - spans[i].start.get();
    let said =
        format!("{:.4}, {:.4} beside, copy waits for span {:?}", seconds(0), seconds(1), spans[2].blocked_on);
    expect(seconds(0) >= 0.02, format!("the slow fill took {said}"))?;
    expect(seconds(1) >= 0.01, format!("the kernel beside it took {said}"))?;
    expect(spans[1].start.get() < spans[0].end.get(), "the two streams ran one after the other")?;
    expect(spans[2].start.get() >= spans[0].end.get() - 1e-5, "the copy began before its input was there")?;
    expect(spans[2].blocked_on == Some(0), said.clone())?;
    Ok(said)
}

fn too_much(context: &Context) -> Result<String, BoxError> {
    let (free, _) = context.gpu.memory()?;
    let error = gpu_store(free.get() + (64 << 30), 0).err().ok_or("more than all memory was given")?;
    expect(matches!(error, StoreError::DeviceMemory { .. }), error.to_string())?;
    let (after, _) = context.gpu.memory()?;
    expect(after.get() + (64 << 20) > free.get(), "memory is missing after the refusal")?;
    copies(context)?;
    Ok(error.to_string())
}

/// Host memory is pinned in parts of 32 GiB; a copy may lie across two.
fn across_parts(_: &Context) -> Result<String, BoxError> {
    const PART: u64 = 32 << 30;
    let store = gpu_store(1 << 20, PART + (1 << 20))?;
    let x = store.put("put", Tier::Hbm, (0..1 << 20).map(|i: u32| (i % 251) as u8).collect())?;
    let y = store.reserve_at(Tier::Host, PART - (1 << 19), Bytes(1 << 20))?;
    store.copy("across", &x, &y, &[])?;
    let bytes = store.get(&y)?;
    expect(bytes.iter().enumerate().all(|(i, &b)| b == (i % 251) as u8), "wrong bytes")?;
    Ok(String::new())
}

fn probed(context: &Context) -> Result<String, BoxError> {
    let store = programs::open(context, 64 << 20, 64 << 20)?;
    let rates = store.probe_links(Bytes(8 << 20))?;
    expect(rates.h2d.get() > 1e9 && rates.d2h.get() > 1e9, format!("{rates:?}"))?;
    let empty = store.put("nothing", Tier::Hbm, Vec::new())?;
    expect(store.get(&empty)?.is_empty(), "something")?;
    let (x, y) = (store.reserve(Tier::Host, Bytes(0))?, store.reserve(Tier::Hbm, Bytes(0))?);
    store.copy("nothing", &x, &y, &[])?;
    store.synchronize()?;
    Ok(format!("H2D {:.1}, D2H {:.1} GB/s", rates.h2d.get() / 1e9, rates.d2h.get() / 1e9))
}

/// A stream that records a graph cannot be waited for.
fn capturing(context: &Context) -> Result<String, BoxError> {
    let store = gpu_store(1 << 20, 1 << 20)?;
    let own = context.gpu.context().new_stream()?;
    let slice = own.alloc_zeros::<u8>(4096)?;
    let range = range_of(&slice);
    // SAFETY: the stream and the slice live to the end; the copy is refused.
    let memory =
        unsafe { DeviceMemory::new(range.address, range.bytes, Stream::from_raw(own.cu_stream().cast())) };
    let saved = store.reserve(Tier::Host, range.bytes)?;
    own.begin_capture(cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    let refused = store.put_memory("put", &memory, &saved);
    drop(own.end_capture(
        cudarc::driver::sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH,
    ));
    let refused = refused.err().ok_or("a stream that is captured was ordered")?;
    expect(matches!(refused, StoreError::Device { .. }), refused.to_string())?;
    store.put_memory("put", &memory, &saved)?.wait();
    store.synchronize()?;
    Ok(refused.to_string())
}

fn refusals(_: &Context) -> Result<String, BoxError> {
    let cuda = StoreOptions { device: DeviceChoice::Cuda { ordinal: 0 }, ..StoreOptions::default() };
    let limits = LinkLimits { h2d: Some(lazy_store::BytesPerSecond(1e9)), ..LinkLimits::default() };
    let tried = [
        Store::open(StoreOptions { device: DeviceChoice::Cuda { ordinal: 99 }, ..cuda.clone() }),
        Store::open(StoreOptions { limits, ..cuda.clone() }),
        Store::open(StoreOptions { order: QueueOrder::Seeded(1), ..cuda.clone() }),
    ];
    let mut said = Vec::new();
    for store in tried {
        said.push(store.err().ok_or("not refused")?.to_string());
    }
    let store = gpu_store(4096, 4096)?;
    let x = store.reserve(Tier::Hbm, Bytes(64))?;
    let task = Submission { writes: &[&x], ..Submission::new(Lane::Compute, "on the CPU") };
    let error = store.submit(task, |_| Ok(())).err().ok_or("HBM was given to the CPU")?;
    said.push(error.to_string());
    Ok(said.join(" | "))
}

fn failing_task(context: &Context) -> Result<String, BoxError> {
    let store = gpu_store(1 << 20, 1 << 20)?;
    let (x, y) = (store.reserve(Tier::Hbm, Bytes(4096))?, store.reserve(Tier::Host, Bytes(4096))?);
    let kernel = context.fill.clone();
    let task = Submission { writes: &[&x], ..Submission::new(Lane::Compute, "refused launch") };
    store.launch(task, move |cx| {
        let args = [Arg::Address(cx.write(0).address), Arg::U32(1), Arg::U32(1)];
        // More threads than a block can have.
        // SAFETY: the kernel's parameters; it would write a word of the extent.
        Ok(unsafe { kernel.launch(cx.stream(), Grid::linear(1, 1 << 20), &args) }?)
    })?;
    store.copy("out", &x, &y, &[])?;
    let error = store.synchronize().err().ok_or("not reported")?;
    expect(!x.is_written() && !y.is_written(), "what was not written counts as written")?;
    let kernel = context.fill.clone();
    let task = Submission { writes: &[&x], ..Submission::new(Lane::Compute, "fill") };
    store.launch(task, move |cx| fill(&kernel, cx.stream(), cx.write(0), 7))?;
    store.copy("out", &x, &y, &[])?;
    expect(differing(&store, &y, 7)? == 0, "wrong bytes after the failure")?;
    let broken = Module::compile(&context.gpu, "broken", "extern \"C\" __global__ void f() { oops }", &[]);
    let broken = broken.err().ok_or("compiled")?;
    expect(broken.to_string().contains("oops"), broken.to_string())?;
    Ok(error.to_string())
}

fn contexts(_: &Context) -> Result<String, BoxError> {
    let count = lazy_store::cuda::device_count()?;
    if count < 2 {
        return Ok("one GPU here: nothing to tell apart".to_owned());
    }
    let (first, last) = (Gpu::open(0)?, Gpu::open(count - 1)?);
    let before = first.memory()?.0;
    let store = Store::open(StoreOptions {
        device: DeviceChoice::Cuda { ordinal: count - 1 },
        hbm: Bytes(1 << 30),
        host: Bytes(1 << 20),
        ..StoreOptions::default()
    })?;
    let (x, y) = (store.reserve(Tier::Host, Bytes(4096))?, store.reserve(Tier::Hbm, Bytes(4096))?);
    fill_host(&store, &x, 3)?;
    store.copy("in", &x, &y, &[])?;
    store.copy("out", &y, &x, &[])?;
    expect(differing(&store, &x, 3)? == 0, "wrong bytes")?;
    expect(first.memory()?.0 == before, "GPU 0 lost memory")?;
    expect(last.memory()?.0 < last.memory()?.1, "GPU 1 has no allocation")?;
    Ok(format!("{count} GPUs"))
}

fn no_leak(context: &Context) -> Result<String, BoxError> {
    let descriptors = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let threads = || std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    let round = || -> Result<(), BoxError> {
        let store = programs::open(context, 4 << 20, 4 << 20)?;
        programs::run(context, &store, 5, 20)?;
        Ok(())
    };
    round()?;
    let (free, open, running) = (context.gpu.memory()?.0, descriptors(), threads());
    for _ in 0..50 {
        round()?;
    }
    let now = (context.gpu.memory()?.0, descriptors(), threads());
    expect(now.0.get() + (8 << 20) >= free.get(), format!("{free} free before, {} after", now.0))?;
    expect(
        (now.1, now.2) == (open, running),
        format!("{open} files, {running} threads before; {now:?} after"),
    )?;
    Ok(String::new())
}

/// In a process of its own, since the driver ends the context.
fn kernel_fault(context: &Context) -> Result<String, BoxError> {
    const CHILD: &str = "LAZY_KERNEL_FAULT";
    if std::env::var_os(CHILD).is_none() {
        let this = std::env::current_exe()?;
        let name = "a kernel's fault is a typed error, and the store ends";
        let child = std::process::Command::new(this).args(["--only", name]).env(CHILD, "1").output()?;
        let said = String::from_utf8_lossy(&child.stdout).into_owned();
        expect(child.status.success(), format!("{}: {said}", child.status))?;
        return Ok(said.lines().find(|l| l.starts_with("ok")).unwrap_or_default().to_owned());
    }
    let store = gpu_store(1 << 20, 1 << 20)?;
    let (x, y) = (store.reserve(Tier::Hbm, Bytes(4096))?, store.reserve(Tier::Host, Bytes(4096))?);
    let kernel = context.fill.clone();
    let task = Submission { writes: &[&x], ..Submission::new(Lane::Compute, "bad address") };
    store.launch(task, move |cx| {
        fill(&kernel, cx.stream(), DeviceRange { address: 64, bytes: Bytes(4096) }, 1)
    })?;
    store.copy("out", &x, &y, &[])?;
    let error = store.synchronize().err().ok_or("not reported")?;
    let again = store.copy("out", &x, &y, &[]).err().ok_or("unwritten bytes were copied")?;
    drop((x, y));
    drop(store);
    Ok(format!("{error}; {again}"))
}
