//! Kernels of CUDA C++: compiled when they are first needed, kept, launched.
//!
//! The compiler (NVRTC) is loaded at run time. What it made is kept in memory for the life of the process and on disk in
//! the user's cache folder, under the hash of everything that went into it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys as driver;
use cudarc::nvrtc::{result as nvrtc, sys};
use sha2::{Digest, Sha256};

use super::gpu::Gpu;
use super::{failed, library};
use crate::device::Stream;
use crate::error::StoreError;

/// The oldest compiler that has all that is used here.
const OLDEST_COMPILER: i32 = 12;
/// First bytes of a file of the cache; the last counts its versions.
const MAGIC: &[u8; 8] = b"lazykrn\x01";

/// Compiled kernels, loaded on one GPU until the process ends: what is launched may still be running when its last handle
/// goes. Cheap to clone; the same source is loaded once.
#[derive(Clone)]
pub struct Module {
    loaded: Arc<Loaded>,
}

/// Never unloaded.
struct Loaded {
    name: String,
    module: driver::CUmodule,
    gpu: Gpu,
}

// SAFETY: the handle is used from any thread on which the GPU is current.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

/// One kernel of a module. Cheap to clone.
#[derive(Clone)]
pub struct Kernel {
    function: driver::CUfunction,
    loaded: Arc<Loaded>,
}

// SAFETY: as for the module's handle.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// How many blocks and threads a kernel runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y, z.
    pub blocks: [u32; 3],
    /// Threads of a block in x, y, z.
    pub threads: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

impl Grid {
    /// `blocks` of `threads` in one dimension, without dynamic shared memory.
    pub fn linear(blocks: u32, threads: u32) -> Grid {
        Grid { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared_bytes: 0 }
    }
}

/// An argument of a kernel: a value of the parameter's size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// A pointer of the device.
    Address(u64),
    /// `int`.
    I32(i32),
    /// `unsigned`.
    U32(u32),
    /// `unsigned long long`.
    U64(u64),
    /// `float`.
    F32(f32),
}

impl Arg {
    fn pointer(&self) -> *mut c_void {
        let start: *const c_void = match self {
            Arg::Address(v) | Arg::U64(v) => std::ptr::from_ref(v).cast(),
            Arg::I32(v) => std::ptr::from_ref(v).cast(),
            Arg::U32(v) => std::ptr::from_ref(v).cast(),
            Arg::F32(v) => std::ptr::from_ref(v).cast(),
        };
        start.cast_mut()
    }
}

impl Module {
    /// Compiles `source`, or takes what was made of it before, and loads it. `name` appears in messages; `options` are the
    /// compiler's, without the architecture, which is the GPU's own. CUDA's headers are found where its library is.
    ///
    /// # Errors
    ///
    /// [`StoreError::LibraryMissing`] without NVRTC, [`StoreError::Kernel`] with the compiler's messages,
    /// [`StoreError::Cuda`].
    pub fn compile(gpu: &Gpu, name: &str, source: &str, options: &[&str]) -> Result<Module, StoreError> {
        static LOADED: Mutex<BTreeMap<(usize, String), Module>> = Mutex::new(BTreeMap::new());
        let options = all_options(gpu, options)?;
        let key = key(source, &options, compiler_version()?);
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        match loaded.entry((gpu.context().ordinal(), key)) {
            Entry::Occupied(known) => Ok(known.get().clone()),
            Entry::Vacant(free) => {
                let code = compiled(name, source, &options, &free.key().1)?;
                Ok(free.insert(Module::load(gpu, name, &code)?).clone())
            }
        }
    }

    fn load(gpu: &Gpu, name: &str, code: &[u8]) -> Result<Module, StoreError> {
        gpu.bind()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: `code` is a whole image made by the compiler, and lives through the call.
        let loaded = unsafe { driver::cuModuleLoadData(&raw mut module, code.as_ptr().cast()) };
        loaded.result().map_err(|e| failed("load compiled kernels", e))?;
        Ok(Module { loaded: Arc::new(Loaded { name: name.to_owned(), module, gpu: gpu.clone() }) })
    }

    /// The kernel called `name`, declared `extern "C"`.
    ///
    /// # Errors
    ///
    /// [`StoreError::Kernel`] where there is none.
    pub fn kernel(&self, name: &str) -> Result<Kernel, StoreError> {
        self.loaded.gpu.bind()?;
        let missing = |log: String| StoreError::Kernel { name: format!("{}::{name}", self.loaded.name), log };
        let symbol = CString::new(name).map_err(|e| missing(e.to_string()))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded and the name ends with zero.
        let found =
            unsafe { driver::cuModuleGetFunction(&raw mut function, self.loaded.module, symbol.as_ptr()) };
        found.result().map_err(|e| missing(super::describe(e)))?;
        Ok(Kernel { function, loaded: Arc::clone(&self.loaded) })
    }
}

impl Kernel {
    /// Lets a block use up to `bytes` of dynamic shared memory, where that is more than 48 KiB.
    ///
    /// # Errors
    ///
    /// [`StoreError::Cuda`] where the GPU has less.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), StoreError> {
        self.loaded.gpu.bind()?;
        let attribute = driver::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        // SAFETY: the function is alive.
        let set = unsafe { driver::cuFuncSetAttribute(self.function, attribute, bytes) };
        set.result().map_err(|e| failed("give a kernel that much shared memory", e))
    }

    /// Puts the kernel on a stream. The GPU is current on the calling thread, as it is in the tasks of a store.
    ///
    /// # Errors
    ///
    /// [`StoreError::Cuda`] where the driver refuses the launch. What goes wrong while the kernel runs is reported by what
    /// waits for the stream.
    ///
    /// # Safety
    ///
    /// `args` are the kernel's parameters, in number, order and type; the kernel touches only memory that is valid and in
    /// nobody else's use until it has run.
    pub unsafe fn launch(&self, stream: Stream, grid: Grid, args: &[Arg]) -> Result<(), StoreError> {
        let mut pointers: Vec<*mut c_void> = args.iter().map(Arg::pointer).collect();
        let ([bx, by, bz], [tx, ty, tz]) = (grid.blocks, grid.threads);
        // SAFETY: the function is alive, and the driver copies the parameters during the call; the rest is this function's
        // contract.
        let launched = unsafe {
            driver::cuLaunchKernel(
                self.function,
                bx,
                by,
                bz,
                tx,
                ty,
                tz,
                grid.shared_bytes,
                stream.0.cast(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        launched.result().map_err(|e| failed("launch a kernel", e))
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernels {}", self.loaded.name)
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel of {}", self.loaded.name)
    }
}

/// The caller's options, the GPU's architecture, and where CUDA's headers are. Loads the compiler.
fn all_options(gpu: &Gpu, options: &[&str]) -> Result<Vec<String>, StoreError> {
    library::load("NVRTC, the CUDA compiler", &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"])?;
    let (major, minor) = gpu.capability();
    // From 9.0 on, the instructions of one architecture alone are under its own name.
    let own = if major >= 9 { "a" } else { "" };
    let mut all = vec![format!("--gpu-architecture=sm_{major}{minor}{own}")];
    all.extend(options.iter().map(|&option| option.to_owned()));
    let folders = library::include_folders().into_iter();
    all.extend(folders.map(|path| format!("--include-path={}", path.display())));
    Ok(all)
}

/// Machine code of `source`: kept on disk from before, or compiled now.
fn compiled(name: &str, source: &str, options: &[String], key: &str) -> Result<Vec<u8>, StoreError> {
    let file = cache_folder().map(|folder| folder.join(key));
    if let Some(code) = file.as_deref().and_then(read_cached) {
        return Ok(code);
    }
    let code = compile(name, source, options)?;
    if let Some(file) = &file {
        // A cache that cannot be written costs the next process a compilation.
        let _ = write_cached(file, &code);
    }
    Ok(code)
}

fn key(source: &str, options: &[String], version: (i32, i32)) -> String {
    let mut hash = Sha256::new();
    for part in [source, &format!("{version:?}")].into_iter().chain(options.iter().map(String::as_str)) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn compiler_version() -> Result<(i32, i32), StoreError> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library was loaded, and fills the numbers it is given.
    unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }
        .result()
        .map_err(|e| StoreError::Cuda { what: "ask the CUDA compiler's version", reason: e.to_string() })?;
    if major < OLDEST_COMPILER {
        let reason = format!("NVRTC {major}.{minor} was found and this needs 12.0; install a newer one");
        return Err(StoreError::Cuda { what: "use the CUDA compiler", reason });
    }
    Ok((major, minor))
}

/// A program of the compiler's, given back when dropped.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made in `compile`, given back once.
        let _ = unsafe { nvrtc::destroy_program(self.0) };
    }
}

fn compile(name: &str, source: &str, options: &[String]) -> Result<Vec<u8>, StoreError> {
    let refused = |log: String| StoreError::Kernel { name: name.to_owned(), log };
    let text = CString::new(source).map_err(|e| refused(e.to_string()))?;
    let file = CString::new(format!("{name}.cu")).map_err(|e| refused(e.to_string()))?;
    let program = nvrtc::create_program(&text, Some(&file)).map_err(|e| refused(e.to_string()))?;
    let program = Program(program);
    // SAFETY: the program is alive.
    if let Err(error) = unsafe { nvrtc::compile_program(program.0, options) } {
        // SAFETY: the program is alive; its log ends with zero.
        let log = unsafe { nvrtc::get_program_log(program.0) }.map(|log| {
            // SAFETY: as above.
            unsafe { CStr::from_ptr(log.as_ptr()) }.to_string_lossy().into_owned()
        });
        return Err(refused(log.unwrap_or_else(|_| error.to_string())));
    }
    let mut len = 0;
    // SAFETY: the program was compiled; the library fills the number it is given.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &raw mut len) }
        .result()
        .map_err(|e| refused(e.to_string()))?;
    let mut code = vec![0_u8; len];
    // SAFETY: as above, and `code` has the length it asked for.
    unsafe { sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast::<c_char>()) }
        .result()
        .map_err(|e| refused(e.to_string()))?;
    Ok(code)
}

fn cache_folder() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let base = base.or_else(|| std::env::home_dir().map(|home| home.join(".cache")))?;
    Some(base.join("lazy/kernels"))
}

/// What was kept under this name, if it is whole.
fn read_cached(file: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let (magic, rest) = bytes.split_at_checked(MAGIC.len())?;
    let (sum, code) = rest.split_at_checked(4)?;
    (magic == MAGIC && sum == crc32c::crc32c(code).to_le_bytes() && !code.is_empty()).then(|| code.to_vec())
}

/// Keeps `code`, whole or not at all.
fn write_cached(file: &Path, code: &[u8]) -> std::io::Result<()> {
    let Some(folder) = file.parent() else { return Ok(()) };
    std::fs::create_dir_all(folder)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(crc32c::crc32c(code).to_le_bytes());
    bytes.extend(code);
    let own = file.with_extension(format!("{}", std::process::id()));
    let written = std::fs::write(&own, bytes).and_then(|()| std::fs::rename(&own, file));
    if written.is_err() {
        let _ = std::fs::remove_file(&own);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_code_is_read_back_and_a_damaged_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a/b");
        write_cached(&file, b"code").unwrap();
        assert_eq!(read_cached(&file).unwrap(), b"code");
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        assert!(read_cached(&file).is_none());
        for len in 0..bytes.len() {
            std::fs::write(&file, &bytes[..len]).unwrap();
            assert!(read_cached(&file).is_none(), "{len}");
        }
    }

    #[test]
    fn everything_that_changes_the_code_changes_its_name() {
        let options = |text: &str| vec![text.to_owned()];
        let one = key("source", &options("-DX=1"), (13, 0));
        assert_eq!(one, key("source", &options("-DX=1"), (13, 0)));
        for other in [
            key("sourc", &options("e-DX=1"), (13, 0)),
            key("source", &options("-DX=2"), (13, 0)),
            key("source", &options("-DX=1"), (13, 1)),
        ] {
            assert_ne!(one, other);
        }
    }
}
