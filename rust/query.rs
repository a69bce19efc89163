//! Query strings of request targets, in form encoding.

/// Returns the first value of a parameter, decoded as forms are.
pub fn parameter(query: &[u8], name: &str) -> Option<String> {
    query.split(|&byte| byte == b'&').find_map(|pair| {
        let mut halves = pair.splitn(2, |&byte| byte == b'=');
        let is_named = decode(halves.next()?) == name;
        is_named.then(|| decode(halves.next().unwrap_or_default()))
    })
}

/// Decodes plus signs and percent escapes; invalid escapes stay unchanged.
fn decode(text: &[u8]) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [byte, after @ ..] = rest {
        rest = after;
        match (byte, after) {
            (b'+', _) => out.push(b' '),
            (b'%', [high, low, after @ ..]) => match (digit(*high), digit(*low)) {
                (Some(high), Some(low)) => {
                    out.push(high << 4 | low);
                    rest = after;
                }
                _ => out.push(b'%'),
            },
            _ => out.push(*byte),
        }
    }
    String::from_utf8(out)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).map(|digit| digit as u8)
}
