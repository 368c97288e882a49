//! cuFile (GPUDirect Storage): between a drive and GPU memory, direct or through cuFile's own host memory.
//!
//! The library is loaded when it is asked for. This module takes bytes and addresses only, compares counts like every
//! other back end (in the transfer loop), and panics nowhere, least of all in `drop`.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::os::unix::Library;

use super::pool::{Blocking, Positioned};
use super::{Op, Window};
use crate::cuda::library;
use crate::device::Device;

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Status {
    cufile: c_int,
    cuda: c_int,
}

/// `CUfileDescr_t`.
#[repr(C)]
struct Description {
    kind: c_int,
    file: Named,
    operations: *const c_void,
}

/// The union within it.
#[repr(C)]
union Named {
    file: c_int,
    _handle: *mut c_void,
}

/// `CUfileDrvProps_t`, and room for what later versions append.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Properties {
    nvfs_major: u32,
    nvfs_minor: u32,
    poll_threshold: usize,
    max_direct: usize,
    /// What is supported, a bit each.
    status: u32,
    /// What is allowed, a bit each.
    control: u32,
    features: u32,
    max_cache_kib: u32,
    per_buffer_cache_kib: u32,
    max_pinned_kib: u32,
    max_batch: u32,
    max_batch_timeout_ms: u32,
    _later: [u64; 32],
}

// The layouts of the header that comes with cuFile 1.0 to 1.20, on 64-bit systems.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<Status>() == 8);
    assert!(size_of::<Description>() == 24);
    assert!(size_of::<Properties>() == 56 + 256);
};

const KIND_FILE: c_int = 1;
const NVME_SUPPORTED: u32 = 1 << 4;
const P2P_SUPPORTED: u32 = 1 << 4;
const NVME_P2P_SUPPORTED: u32 = 1 << 11;

type Handle = *mut c_void;

/// The functions used, all of C.
struct Functions {
    handle_register: unsafe extern "C" fn(*mut Handle, *mut Description) -> Status,
    handle_deregister: unsafe extern "C" fn(Handle),
    buf_register: unsafe extern "C" fn(*const c_void, usize, c_int) -> Status,
    buf_deregister: unsafe extern "C" fn(*const c_void) -> Status,
    read: unsafe extern "C" fn(Handle, *mut c_void, usize, i64, i64) -> isize,
    write: unsafe extern "C" fn(Handle, *const c_void, usize, i64, i64) -> isize,
    properties: Properties,
    _library: Library,
}

/// Loads the library and opens its driver, once for the process. It is not closed before the process ends: others in it
/// may be using it too.
fn functions() -> Result<&'static Functions, String> {
    static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
    let open = || {
        // Without a driver, cuFile's own opening was seen to hang.
        library::load("the CUDA driver, which cuFile needs,", &["libcuda.so.1"])
            .map_err(|e| e.to_string())?;
        open(&["libcufile.so.0", "libcufile.so"])
    };
    FUNCTIONS.get_or_init(open).as_ref().map_err(Clone::clone)
}

fn open(names: &[&str]) -> Result<Functions, String> {
    let library = library::load("cuFile", names).map_err(|e| e.to_string())?;
    // SAFETY: the symbols have these types in `cufile.h`, and the library stays loaded beside them.
    unsafe {
        let driver_open: unsafe extern "C" fn() -> Status = symbol(&library, "cuFileDriverOpen")?;
        let properties_of: unsafe extern "C" fn(*mut Properties) -> Status =
            symbol(&library, "cuFileDriverGetProperties")?;
        let mut functions = Functions {
            handle_register: symbol(&library, "cuFileHandleRegister")?,
            handle_deregister: symbol(&library, "cuFileHandleDeregister")?,
            buf_register: symbol(&library, "cuFileBufRegister")?,
            buf_deregister: symbol(&library, "cuFileBufDeregister")?,
            read: symbol(&library, "cuFileRead")?,
            write: symbol(&library, "cuFileWrite")?,
            properties: Properties::default(),
            _library: library,
        };
        match driver_open() {
            // Somebody else in this process opened it.
            Status { cufile: 5026, .. } => {}
            status => check("open its driver", status)?,
        }
        check("ask its driver what it can do", properties_of(&mut functions.properties))?;
        Ok(functions)
    }
}

/// # Safety
///
/// `T` is the type of a pointer to the symbol of that name, and is not used after the library.
unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|e| format!("the cuFile library lacks {name}: {e}"))
}

fn check(what: &str, status: Status) -> Result<(), String> {
    match status {
        Status { cufile: 0, .. } => Ok(()),
        Status { cufile: 5011, cuda } => Err(format!("cuFile cannot {what}: CUDA error {cuda}")),
        Status { cufile, .. } => Err(format!("cuFile cannot {what}: {}", explain(cufile.into()))),
    }
}

/// What a number of `CUfileOpError` means, and what to do about it.
fn explain(code: i64) -> String {
    let text = match code {
        5001 => {
            "the nvidia-fs driver is not loaded and compatibility mode is off; load it, or set allow_compat_mode in cufile.json"
        }
        5002..=5005 => "the nvidia-fs driver and this library do not fit; install those of one release",
        5007..=5009 => {
            "GPUDirect Storage does not support this platform, file or GPU, and compatibility mode is off"
        }
        5010 | 5033 | 5048 => "the nvidia-fs driver failed; see the kernel's log",
        5012..=5014 | 5024 => "an address is not one of GPU memory known here",
        5015 | 5047 => "no CUDA context, or another one, is current on the thread",
        5016 | 5017 | 5036 | 5045 => {
            "no more GPU memory can be pinned; see BAR1 and max_device_pinned_mem_size_kb in cufile.json"
        }
        5018 | 5019 => {
            "it does not take files like this one; choose a folder on ext4 or xfs on a local drive"
        }
        5020 => "the file is not open for direct I/O",
        5025 => "permission denied on the driver or the file",
        // It looks for ID_FS_USAGE, which only udev knows.
        5027 => {
            "udev has no entry for the drive, as in containers and virtual machines without udevd: mount the host's /run/udev, \
             or make /run/udev/data/bMAJOR:MINOR with the lines E:ID_FS_USAGE=filesystem and E:ID_FS_TYPE=ext4"
        }
        5030 => "an internal error, as on overlay file systems and without /run/udev; see cufile.log",
        5034 => "cufile.json switches GPUDirect Storage off for this file",
        5043 => "it is out of memory",
        _ => "see cufile.log",
    };
    format!("error {code} ({text})")
}

/// Whether bytes go straight between drive and GPU; otherwise, why not.
fn directness(properties: &Properties, forced: Option<String>) -> Result<(), String> {
    if let Some(forced) = forced {
        return Err(forced);
    }
    let nvfs = properties.nvfs_major > 0 && properties.status & NVME_SUPPORTED != 0;
    let p2p = properties.features & P2P_SUPPORTED != 0 && properties.status & NVME_P2P_SUPPORTED != 0;
    if nvfs || p2p {
        return Ok(());
    }
    Err(if properties.nvfs_major == 0 {
        "the nvidia-fs driver is not loaded, and the kernel has no peer-to-peer DMA with this drive"
            .to_owned()
    } else {
        "the nvidia-fs driver is loaded and does not support NVMe here".to_owned()
    })
}

/// Where compatibility mode is forced, if it is.
fn forced() -> Option<String> {
    let on = |value: &str| ["1", "true", "yes", "on"].contains(&value.trim().to_ascii_lowercase().as_str());
    if std::env::var("CUFILE_FORCE_COMPAT_MODE").is_ok_and(|value| on(&value)) {
        return Some("CUFILE_FORCE_COMPAT_MODE asks for compatibility mode".to_owned());
    }
    let file = std::env::var("CUFILE_ENV_PATH_JSON").unwrap_or_else(|_| "/etc/cufile.json".to_owned());
    let text = std::fs::read_to_string(Path::new(&file)).ok()?;
    forced_by(&text).then(|| format!("{file} asks for compatibility mode"))
}

/// Whether a configuration sets `force_compat_mode`. It is JSON with comments.
fn forced_by(text: &str) -> bool {
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let bare: String = lines.flat_map(str::chars).filter(|c| !c.is_whitespace()).collect();
    bare.contains("\"force_compat_mode\":true")
}

/// Files registered with cuFile, and the GPU memory to move. Dropped after the threads that use it.
pub(crate) struct Cufile {
    functions: &'static Functions,
    /// Why bytes pass through host memory, where they do.
    pub(crate) compatibility: Option<String>,
    handles: Mutex<Vec<(RawFd, usize)>>,
    device: OnceLock<Gpu>,
}

struct Gpu {
    device: Arc<dyn Device>,
    /// The arena in its memory.
    arena: Window,
    registered: bool,
}

impl Cufile {
    /// Loads cuFile, or says why there is none.
    pub(crate) fn open() -> Result<Arc<Self>, String> {
        let functions = functions()?;
        let compatibility = directness(&functions.properties, forced()).err();
        let (handles, device) = (Mutex::default(), OnceLock::new());
        Ok(Arc::new(Cufile { functions, compatibility, handles, device }))
    }

    /// Registers files, which have to stay open for as long as this lives.
    pub(crate) fn register_files(&self, files: &[BorrowedFd<'_>]) -> Result<(), String> {
        for file in files {
            let mut handle: Handle = std::ptr::null_mut();
            let named = Named { file: file.as_raw_fd() };
            let mut description = Description { kind: KIND_FILE, file: named, operations: std::ptr::null() };
            // SAFETY: both point to structures of the header's layout that live as long as the call.
            let status = unsafe { (self.functions.handle_register)(&mut handle, &mut description) };
            check("register a file", status)?;
            self.handles().push((file.as_raw_fd(), handle.expose_provenance()));
        }
        Ok(())
    }

    /// Takes a device and its arena, which live as long as this, and registers the arena once. What could not be registered
    /// is moved through cuFile's own buffers; then the reason is returned.
    pub(crate) fn use_device(&self, device: Arc<dyn Device>, arena: Window) -> Result<(), String> {
        device.bind().map_err(|e| e.to_string())?;
        // SAFETY: the arena is the device's memory, and is deregistered before it goes (`drop`). The length is in bytes.
        let status = unsafe { (self.functions.buf_register)(arena.start.cast_const().cast(), arena.len, 0) };
        let registered = check("register the arena in GPU memory", status);
        let gpu = Gpu { device, arena, registered: registered.is_ok() };
        if self.device.set(gpu).is_err() {
            return Err("a device was named before".to_owned());
        }
        registered.map_err(|e| format!("buffers are not registered: {e}"))
    }

    fn handles(&self) -> MutexGuard<'_, Vec<(RawFd, usize)>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handle(&self, file: RawFd) -> io::Result<Handle> {
        let known = self.handles().iter().find(|(fd, _)| *fd == file).map(|(_, handle)| *handle);
        known
            .map(std::ptr::with_exposed_provenance_mut)
            .ok_or_else(|| io::Error::other("the file is not registered with cuFile"))
    }
}

impl Blocking for Arc<Cufile> {
    fn prepare(&self) {
        // A thread that cannot use the device finds that out with its first call, which reports it.
        let _ = self.device.get().map(|gpu| gpu.device.bind());
    }

    unsafe fn call(&self, file: BorrowedFd<'_>, op: Op, memory: Window, offset: u64) -> io::Result<usize> {
        let within = |gpu: &&Gpu| {
            let (start, end) = (gpu.arena.start.addr(), gpu.arena.start.addr() + gpu.arena.len);
            (start..end).contains(&memory.start.addr())
        };
        let Some(gpu) = self.device.get().filter(within) else {
            // Host memory needs no cuFile.
            // SAFETY: the caller's promise.
            return unsafe { Positioned.call(file, op, memory, offset) };
        };
        let handle = self.handle(file.as_raw_fd())?;
        let base = gpu.arena.start;
        let within = (memory.start.addr() - base.addr()) as i64;
        // SAFETY: the range lies in the arena, which is mapped on the device and, by the caller's promise, used by nobody
        // else until this returns.
        let moved = unsafe {
            match op {
                Op::Read => (self.functions.read)(handle, base.cast(), memory.len, offset as i64, within),
                Op::Write => (self.functions.write)(
                    handle,
                    base.cast_const().cast(),
                    memory.len,
                    offset as i64,
                    within,
                ),
            }
        };
        moved_bytes(moved, io::Error::last_os_error)
    }
}

/// The count that a read or write returned, or the error: -1 with the system's number, or cuFile's own negated.
fn moved_bytes(moved: isize, system: impl FnOnce() -> io::Error) -> io::Result<usize> {
    match moved {
        0.. => Ok(moved.unsigned_abs()),
        -1 => Err(system()),
        _ => Err(io::Error::other(format!("cuFile: {}", explain(-(moved as i64))))),
    }
}

impl Drop for Cufile {
    fn drop(&mut self) {
        if let Some(gpu) = self.device.get()
            && gpu.registered
            && gpu.device.bind().is_ok()
        {
            // SAFETY: registered in `use_device`, and nothing is in flight: the threads that use it are gone. What fails
            // here, after the context was lost for example, concerns nobody any more.
            let _ = unsafe { (self.functions.buf_deregister)(gpu.arena.start.cast_const().cast()) };
        }
        for (_, handle) in self.handles().drain(..) {
            // SAFETY: registered in `register_files`, and in use by nobody.
            unsafe { (self.functions.handle_deregister)(std::ptr::with_exposed_provenance_mut(handle)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t4_an_absent_library_is_named_with_what_was_looked_for() {
        let error = open(&["liblazy-no-such-cufile.so.0"]).err().unwrap();
        assert!(error.contains("cuFile") && error.contains("liblazy-no-such-cufile.so.0"), "{error}");
    }

    #[test]
    fn t4_a_library_without_the_functions_is_refused() {
        // The C library is there everywhere, and is not cuFile.
        let error = open(&["libc.so.6"]).err().unwrap();
        assert!(error.contains("lacks cuFileDriverOpen"), "{error}");
    }

    #[test]
    fn t4_direct_is_told_from_compatibility_mode_with_the_reason() {
        let none = Properties::default();
        let nvfs = Properties { nvfs_major: 2, status: NVME_SUPPORTED, ..none };
        let p2p = Properties { status: NVME_P2P_SUPPORTED, features: P2P_SUPPORTED, ..none };
        assert!(directness(&nvfs, None).is_ok() && directness(&p2p, None).is_ok());
        let reason = |properties: &Properties, forced| directness(properties, forced).unwrap_err();
        assert!(reason(&none, None).contains("nvidia-fs driver is not loaded"));
        assert!(reason(&Properties { nvfs_major: 2, ..none }, None).contains("does not support NVMe"));
        assert_eq!(reason(&nvfs, Some("asked".to_owned())), "asked");
    }

    #[test]
    fn t4_a_configuration_that_forces_compatibility_mode_is_seen() {
        let json = "{\n // a comment\n \"properties\": { \"allow_compat_mode\": true, \"force_compat_mode\" : true }\n}";
        assert!(forced_by(json));
        assert!(!forced_by(&json.replace("\"force_compat_mode\" : true", "\"force_compat_mode\": false")));
        assert!(!forced_by("// \"force_compat_mode\": true"));
    }

    #[test]
    fn t4_error_5027_names_the_missing_entry_of_udev_and_the_remedy() {
        let error = check("register a file", Status { cufile: 5027, cuda: 0 }).unwrap_err();
        assert!(error.contains("5027") && error.contains("ID_FS_USAGE"), "{error}");
        let cuda = check("open its driver", Status { cufile: 5011, cuda: 100 }).unwrap_err();
        assert!(cuda.contains("CUDA error 100"), "{cuda}");
        assert!(check("x", Status { cufile: 0, cuda: 3 }).is_ok());
    }

    #[test]
    fn t6_counts_and_both_kinds_of_errors_are_told_apart() {
        let system = || io::Error::from_raw_os_error(28);
        assert_eq!(moved_bytes(4096, system).unwrap(), 4096);
        assert_eq!(moved_bytes(0, system).unwrap(), 0);
        assert_eq!(moved_bytes(-1, system).unwrap_err().raw_os_error(), Some(28));
        let own = moved_bytes(-5016, system).unwrap_err().to_string();
        assert!(own.contains("5016") && own.contains("BAR1"), "{own}");
    }
}
