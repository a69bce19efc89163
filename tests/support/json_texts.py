"""JSON texts for property tests: not only values, but the many ways to write them."""

from hypothesis import strategies as st

from support import reference

whitespace = st.text(" \t\r\n", max_size=2)
characters = st.one_of(
    st.characters(codec="utf-8"),
    st.sampled_from('"\\/\b\f\n\r\t\x00\x1f\x7f\u2028\uffff\U0001f600'),
)


@st.composite
def string_texts(draw: st.DrawFn, content: st.SearchStrategy[str] | None = None) -> str:
    text = draw(content if content is not None else st.text(characters, max_size=6))
    written = []
    for character in text:
        if character in '"\\' or character < " " or draw(st.integers(0, 4)) == 0:
            units = character.encode("utf-16-be")
            pairs = (units[i : i + 2].hex() for i in range(0, len(units), 2))
            written.append("".join(f"\\u{pair.upper() if draw(st.booleans()) else pair}" for pair in pairs))
        else:
            written.append(character)
    return '"' + "".join(written) + '"'


keys = string_texts(
    st.one_of(
        st.text(characters, max_size=3),
        st.sampled_from(sorted(reference.UNSAFE_KEYS)),
        st.sampled_from(["data", "baseHash", "authorPubkey", "authorSignature"]),
    )
)
number_texts = st.one_of(
    st.integers().map(str),
    st.integers(-(2**66), 2**66).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.builds("{}.{}e{}".format, st.integers(-99, 99), st.integers(0, 10**20), st.integers(-330, 310)),
    st.integers(300, 320).map(lambda digits: "9" * digits),
    st.sampled_from(
        ["-0", "0.0", "-0.0e-5", "1E400", "1e-400", "5e-324", "1e21", "999999999999999900000", "1e-7"]
    ),
)
scalar_texts = st.one_of(st.sampled_from(["null", "true", "false"]), number_texts, string_texts())


def arrays(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    padded = st.tuples(whitespace, inner, whitespace).map("".join)
    return st.lists(padded, max_size=4).map(lambda items: f"[{','.join(items)}]")


def objects(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    member = st.tuples(whitespace, keys, whitespace, st.just(":"), whitespace, inner, whitespace).map("".join)
    return st.lists(member, max_size=6).map(lambda members: f"{{{','.join(members)}}}")


def containers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(arrays(inner), objects(inner))


json_texts = st.recursive(scalar_texts, containers, max_leaves=25)
