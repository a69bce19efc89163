"""DuckDB without a network, for tests."""

from pathlib import Path

import duckdb
import duckdb_extension_httpfs


def connected(folder: Path) -> duckdb.DuckDBPyConnection:
    """A connection to an empty database, with the extension httpfs installed below `folder`."""
    bundled = Path(duckdb_extension_httpfs.__file__).parent / "extensions"
    connection = duckdb.connect(
        config={
            "extension_directory": str(folder),
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
    )
    ((platform,),) = connection.execute("PRAGMA platform").fetchall()
    for extension in bundled.glob("*/*.duckdb_extension"):
        installed = folder / extension.parent.name / platform
        installed.mkdir(parents=True)
        (installed / extension.name).symlink_to(extension)
    return connection
