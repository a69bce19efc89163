//! Objects of a log whose checksum is right and whose positions are not: whoever can write to a store can make
//! one. They are corrupt, and nothing panics.

use _core::append_log::Head;
use _core::error::CoreError;
use _core::log_format::write;
use _core::log_range::LogRange;

const ALL: LogRange = LogRange {
    since: None,
    newest: None,
    oldest: None,
};
const ELEMENTS: &str = "{\"ts\":5,\"data\":{}},\n{\"ts\":6,\"data\":{}},\n{\"ts\":8,\"data\":{}}";

fn head(positions: &str, elements: &str) -> Result<Head, CoreError> {
    let header = format!("\"log\":\"5e\",{positions},\"ts\":8,\"at\":9,\"hash\":\"\"");
    Head::read(&write(&header, Some(elements.as_bytes())))
}

#[test]
fn a_head_is_read_whose_positions_are_those_of_its_elements() {
    for positions in [
        "\"from\":0,\"to\":3",
        "\"from\":7,\"to\":10,\"index\":[[[0,1],[4,2]]]",
        "\"from\":7,\"to\":10,\"index\":[[[4,2]],[[0,1]]]",
    ] {
        let mut found = head(positions, ELEMENTS).expect(positions);
        assert_eq!(found.tail_count, 3);
        for object in found.seal(1) {
            assert!(!object.1.is_empty());
        }
    }
}

#[test]
fn a_head_with_wrong_positions_is_corrupt() {
    for positions in [
        "\"from\":0,\"to\":4",
        "\"from\":0,\"to\":2",
        "\"from\":0,\"to\":18446744073709551615",
        "\"from\":3,\"to\":0",
        "\"from\":7,\"to\":10",
        "\"from\":0,\"to\":3,\"index\":[[[0,1]]]",
        "\"from\":7,\"to\":10,\"index\":[[[4,2]],[[5,1]]]",
        "\"from\":7,\"to\":10,\"index\":[[[1,1],[3,2]]]",
        "\"from\":7,\"to\":10,\"index\":[[[0,1],[0,2]]]",
        "\"from\":7,\"to\":10,\"index\":[[[0,1],[7,2]]]",
        "\"from\":7,\"to\":10,\"index\":[[[0,1],[4,18446744073709551615]]]",
    ] {
        let found = head(positions, ELEMENTS);
        assert_eq!(found.err(), Some(CoreError::DocumentCorrupt), "{positions}");
    }
}

#[test]
fn elements_that_are_not_one_a_line_are_corrupt() {
    for elements in [
        ELEMENTS.replace(",\n", "\n"),
        ELEMENTS.replace(",\n", "\n\n"),
        ELEMENTS.replace(",\n", ",\n\n"),
        ELEMENTS.replace("{\"ts\":", "{\"tt\":"),
        format!("{ELEMENTS},\n"),
        format!("\n{ELEMENTS}"),
        "\n\n\n".into(),
        "\n".into(),
    ] {
        let found = head("\"from\":0,\"to\":3", &elements);
        assert_eq!(found.err(), Some(CoreError::DocumentCorrupt), "{elements}");
    }
}

#[test]
fn a_segment_or_block_with_wrong_positions_is_corrupt() {
    let log = head("\"from\":7,\"to\":10,\"index\":[[[4,2]],[[0,1]]]", ELEMENTS).expect("a head");
    let nodes = log.nodes(ALL);
    let (block, segment) = (&nodes[0], &nodes[1]);
    assert_eq!((block.level, segment.start, segment.end), (1, 4, 7));
    for header in [
        "\"log\":\"5e\",\"from\":4,\"to\":8",
        "\"log\":\"5e\",\"from\":5,\"to\":7",
    ] {
        let stored = write(header, Some(ELEMENTS.as_bytes()));
        assert!(log.slice(&[(segment.clone(), &stored)], true, ALL).is_err());
    }
    let short = write(
        "\"log\":\"5e\",\"from\":4,\"to\":7",
        Some(b"{\"ts\":5,\"data\":{}}"),
    );
    assert!(log.slice(&[(segment.clone(), &short)], true, ALL).is_err());
    for entries in ["[]", "[[1,1]]", "[[0,1],[0,2]]", "[[0,1],[4,2]]"] {
        let header = "\"log\":\"5e\",\"level\":1,\"from\":0,\"to\":4,\"entries\":";
        let stored = write(&format!("{header}{entries}"), None);
        let found = log.expand(&stored, block, ALL);
        assert_eq!(found.err(), Some(CoreError::DocumentCorrupt), "{entries}");
    }
}
