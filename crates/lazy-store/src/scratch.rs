//! Run folders: where the spill files of one run live.
