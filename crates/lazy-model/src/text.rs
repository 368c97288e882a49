//! Files of text, read with a limit.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::error::Error;

/// Far above any chain, config, schedule or checkpoint index; a device or a wrong file ends here and not when memory does.
const MOST_BYTES: u64 = 256 << 20;

/// The text of a file, less the byte order mark that some editors put before it.
///
/// # Errors
/// [`Error::Read`] where the file cannot be read, is larger than 256 MiB, or is not UTF-8.
pub fn read_text(path: &Path) -> Result<String, Error> {
    let refused = |source| Error::Read { path: path.into(), source };
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(MOST_BYTES + 1).read_to_string(&mut text));
    if read.map_err(refused)? as u64 > MOST_BYTES {
        return Err(refused(io::Error::other("it is larger than 256 MiB, and no file of ours is")));
    }
    if text.starts_with('\u{feff}') {
        text.drain(..'\u{feff}'.len_utf8());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_order_mark_is_no_text() {
        let path = std::env::temp_dir().join(format!("lazy-model-text-{}", std::process::id()));
        std::fs::write(&path, "\u{feff}{}\r\n").unwrap();
        let text = read_text(&path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(text.unwrap(), "{}\r\n");
    }

    #[test]
    #[cfg(unix)]
    fn an_endless_file_ends_at_the_limit() {
        let message = read_text(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(message.contains("/dev/zero") && message.contains("256 MiB"), "{message}");
    }
}
