//! SHA-256 and Ed25519 verification by the crates that could carry the core: median and spread of 9 rounds.
//!
//! In this folder, with `--target-dir ../../target/crates`:
//!
//!     RUSTFLAGS='-C target-cpu=native' cargo run --release
//!     RUSTFLAGS= cargo run --release                                     a portable build
//!     RUSTFLAGS='--cfg sha2_backend="soft"' cargo run --release          sha2 as without SHA instructions
//!     OPENSSL_ia32cap=:~0x20000000 cargo run --release                   aws-lc as without SHA instructions

use ed25519_dalek::{Signer, SigningKey, Verifier};
use sha2::Digest;
use std::hint::black_box;
use std::time::Instant;

const ROUNDS: usize = 9;

fn measure(name: &str, calls: u32, mut call: impl FnMut()) {
    let mut micros: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let started = Instant::now();
            for _ in 0..calls {
                call();
            }
            started.elapsed().as_secs_f64() * 1e6 / f64::from(calls)
        })
        .collect();
    micros.sort_by(f64::total_cmp);
    println!("{name:32} {:9.2} us  ({:.2} to {:.2})", micros[ROUNDS / 2], micros[0], micros[ROUNDS - 1]);
}

fn main() {
    for (size, calls) in [(64, 20_000), (1024, 20_000), (524_288, 40)] {
        let bytes = vec![b'a'; size];
        measure(&format!("sha256 {size} sha2"), calls, || {
            black_box(sha2::Sha256::digest(black_box(&bytes)));
        });
        measure(&format!("sha256 {size} ring"), calls, || {
            black_box(ring::digest::digest(&ring::digest::SHA256, black_box(&bytes)));
        });
        measure(&format!("sha256 {size} aws-lc-rs"), calls, || {
            black_box(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, black_box(&bytes)));
        });
    }

    let signer = SigningKey::from_bytes(&[7; 32]);
    let key = signer.verifying_key();
    let message = [1; 240];
    let signature = signer.sign(&message);
    measure("ed25519 dalek verify", 500, || key.verify(black_box(&message), &signature).expect("valid"));
    measure("ed25519 dalek verify_strict", 500, || {
        key.verify_strict(black_box(&message), &signature).expect("valid");
    });
    let ring_key = ring::signature::UnparsedPublicKey::new(&ring::signature::ED25519, key.as_bytes());
    measure("ed25519 ring verify", 500, || {
        ring_key.verify(black_box(&message), &signature.to_bytes()).expect("valid");
    });
    let aws_key = aws_lc_rs::signature::ParsedPublicKey::new(&aws_lc_rs::signature::ED25519, key.as_bytes())
        .expect("valid");
    measure("ed25519 aws-lc-rs verify", 500, || {
        aws_key.verify_sig(black_box(&message), &signature.to_bytes()).expect("valid");
    });
}
