"""The part of `docs/reference/browser-client.md` that loads the module by its version and its hash."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

from pysync import __version__

ROOT: Final = Path(__file__).parents[2]
PATH: Final = "docs/reference/browser-client.md"
_SNIPPET: Final = """\
```html
<script type="importmap">
  {
    "imports": { "pysync": "https://sync.example.org/client/VERSION/pysync.js" },
    "integrity": {
      "https://sync.example.org/client/VERSION/pysync.js":
        "HASH"
    }
  }
</script>
<script type="module">
  import { Client } from "pysync";
</script>
```
"""


def page() -> str:
    """The whole page."""
    digest = hashlib.sha384((ROOT / "pysync/web/pysync.js").read_bytes()).digest()
    pinned = f"sha384-{base64.b64encode(digest).decode()}"
    snippet = _SNIPPET.replace("VERSION", __version__).replace("HASH", pinned)
    marked = re.compile("(?<=<!-- integrity -->\n).*(?=<!-- /integrity -->)", re.DOTALL)
    return marked.sub(snippet, (ROOT / PATH).read_text())
