//! The GET requests of a connection that an overloaded server may refuse unparsed.

/// Headers of requests that have a body, or whose refusal would be another, in lower case.
const UNDECIDED: [&[u8]; 6] = [
    b"connection",
    b"content-length",
    b"origin",
    b"proxy-connection", // aiohttp reads it as "connection"
    b"transfer-encoding",
    b"upgrade",
];

/// Returns where each of the requests ends with which `data` begins, as far as they are complete, have no body, are no
/// health probes, and have a head that all parsers read alike.
pub fn ends(data: &[u8]) -> Vec<usize> {
    let mut ends = Vec::new();
    let mut start = 0;
    while let Some(length) = length(&data[start..]) {
        start += length;
        ends.push(start);
    }
    ends
}

fn length(data: &[u8]) -> Option<usize> {
    let target = data.strip_prefix(b"GET ")?;
    if !target.starts_with(b"/") || target.starts_with(b"/health") {
        return None;
    }
    let target_length = target.iter().position(|byte| !byte.is_ascii_graphic())?;
    let mut rest = target[target_length..].strip_prefix(b" HTTP/1.1\r\n")?;
    loop {
        if let Some(after) = rest.strip_prefix(b"\r\n") {
            return Some(data.len() - after.len());
        }
        let end = rest
            .iter()
            .position(|byte| matches!(byte, b'\0' | b'\n' | b'\r'))?;
        let line = &rest[..end];
        rest = rest[end..].strip_prefix(b"\r\n")?;
        let colon = line.iter().position(|byte| !is_name(*byte))?;
        if colon == 0 || line[colon] != b':' || is_undecided(&line[..colon]) {
            return None;
        }
    }
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')
}

fn is_undecided(name: &[u8]) -> bool {
    UNDECIDED
        .iter()
        .any(|undecided| name.eq_ignore_ascii_case(undecided))
}

#[cfg(test)]
mod tests {
    use super::ends;

    const ONE: &[u8] = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n";

    #[test]
    fn complete_requests_are_found_until_another_comes() {
        assert_eq!(ends(ONE), [ONE.len()]);
        let mut data = ONE.repeat(2);
        data.extend(b"POST / HTTP/1.1\r\n\r\n");
        assert_eq!(ends(&data), [ONE.len(), 2 * ONE.len()]);
        for end in 0..ONE.len() {
            assert!(ends(&ONE[..end]).is_empty());
        }
    }

    #[test]
    fn requests_that_may_have_a_body_are_not_found() {
        for header in [
            "Content-Length: 2",
            "CONNECTION: close",
            "Proxy-Connection: close",
            "X Y: z",
            " a: b",
            ": b",
            "X",
        ] {
            let request = format!("GET / HTTP/1.1\r\n{header}\r\n\r\n");
            assert!(ends(request.as_bytes()).is_empty(), "{header}");
        }
    }
}
