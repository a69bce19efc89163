"""`pysync keys`: only `new` without `--out` prints private keys."""

import argparse
import sys
from pathlib import Path

from pysync.auth.signing import Keys
from pysync.cli.files import print_json, read_keys


def new(options: argparse.Namespace) -> int:
    if options.passphrase_stdin:
        keys = Keys.from_passphrase(sys.stdin.read().removesuffix("\n"))
    else:
        keys = Keys.generate()
    if options.out is None:
        print(keys.to_json().decode(), end="")
    else:
        keys.save(Path(options.out))
        print_json(_public(keys))
    return 0


def show(options: argparse.Namespace) -> int:
    print_json(_public(read_keys(options.file)))
    return 0


def _public(keys: Keys) -> dict[str, str]:
    return {"edPub": keys.ed_pub, "kemPub": keys.kem_pub, "userId": keys.user_id}
