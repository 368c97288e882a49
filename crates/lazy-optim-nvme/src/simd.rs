//! The same code compiled for several instruction sets, one of which is chosen when it runs.
//!
//! Wider registers change how many elements an instruction takes, never a bit of the result: nothing is contracted into
//! fused multiply-adds, and sums have an order of their own.

/// Work that is compiled for every instruction set. `run`, and what it calls element by element, are
/// `#[inline(always)]`: only what is inlined gets the wider registers.
pub(crate) trait Compiled {
    /// What it gives.
    type Output;
    /// Does the work.
    fn run(self) -> Self::Output;
}

/// Registers to work in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InstructionSet {
    /// Those that every processor of the target has.
    Baseline,
    /// Eight float32 lanes.
    Avx2,
    /// Sixteen.
    Avx512,
}

impl InstructionSet {
    /// The widest last.
    pub(crate) const ALL: [InstructionSet; 3] = [Self::Baseline, Self::Avx2, Self::Avx512];

    /// The widest that this processor has.
    pub(crate) fn best() -> InstructionSet {
        Self::ALL.into_iter().rev().find(|set| set.is_present()).unwrap_or(Self::Baseline)
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn is_present(self) -> bool {
        match self {
            Self::Baseline => true,
            Self::Avx2 => is_x86_feature_detected!("avx2"),
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn is_present(self) -> bool {
        self == Self::Baseline
    }

    /// Does the work in these registers, or in the baseline's where the processor lacks them.
    pub(crate) fn run<W: Compiled>(self, work: W) -> W::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the processor has all that the function asks for.
            Self::Avx2 if self.is_present() => unsafe { run_avx2(work) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx512 if self.is_present() => unsafe { run_avx512(work) },
            _ => work.run(),
        }
    }
}

/// Asks for the memory `ahead` elements behind the start of an array, if there is any.
#[inline(always)]
pub(crate) fn prefetch<T>(array: &[T], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of the target has the instruction, which is a hint: nothing is accessed, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(array.as_ptr().wrapping_add(ahead).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (array, ahead);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2<W: Compiled>(work: W) -> W::Output {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn run_avx512<W: Compiled>(work: W) -> W::Output {
    work.run()
}
