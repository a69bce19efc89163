//! Stamps the extension with a digest of its sources, so that Python rejects a stale build in a checkout.
//!
//! `pysync/_build.py` computes the same digest; the two must agree.

use sha2::{Digest, Sha256};
use std::{env, fs, path::Path};

fn main() {
    let root = env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let folder = Path::new(&root).join("rust");
    let mut names: Vec<String> = fs::read_dir(&folder)
        .expect("rust/ is readable")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(".rs"))
        .collect();
    names.sort();
    let mut digest = Sha256::new();
    for name in names {
        digest.update(fs::read(folder.join(name)).expect("a source file is readable"));
    }
    let hex: String = digest
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    println!("cargo:rustc-env=PYSYNC_SOURCE_DIGEST={hex}");
    println!("cargo:rerun-if-changed=rust");
}
