"""The program of the archive of `make dist`: the command `pysync`, with a Python of its own.

It also stands in for that Python, which is `sys.executable` elsewhere: `pysync -m MODULE` runs a module, as a
service does for its backups, and `multiprocessing` starts processes with it.
"""

import multiprocessing
import os
import runpy
import ssl
import sys
from collections.abc import MutableMapping
from typing import Final

from pysync.cli.main import main

AUTHORITIES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",  # Arch, Gentoo
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
)
"""Certificate authorities. The OpenSSL of the archive itself only looks where Debian and Ubuntu have them."""


def adapt(environment: MutableMapping[str, str]) -> None:
    """Find the certificate authorities of this machine, and keep programs that a plugin starts from using the
    libraries of the archive, which its loader has named in `LD_LIBRARY_PATH`."""
    own = environment.pop("LD_LIBRARY_PATH_ORIG", None)
    environment.pop("LD_LIBRARY_PATH", None)
    if own is not None:
        environment["LD_LIBRARY_PATH"] = own
    known = ssl.get_default_verify_paths()
    if known.cafile is None and known.capath is None:
        for path in filter(os.path.exists, AUTHORITIES):
            environment.setdefault("SSL_CERT_FILE", path)


if __name__ == "__main__":
    adapt(os.environ)
    multiprocessing.freeze_support()
    if sys.argv[1:2] == ["-m"]:
        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.exit(main())
