//! Keys of stores: segments between slashes.

/// Splits a key into its parent (`""` at the top) and its name. Returns None for an invalid key: one with an
/// empty, `.` or `..` segment, or a NUL.
pub fn split(key: &str) -> Option<(&str, &str)> {
    let is_valid = |segment| !matches!(segment, "" | "." | "..");
    (key.split('/').all(is_valid) && !key.contains('\0'))
        .then(|| key.rsplit_once('/').unwrap_or(("", key)))
}
