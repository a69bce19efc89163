"""`pysync check --probe`: the store and the coordinator, the machine, and the proxy in front."""

from pysync.diagnose.machine import probe_machine
from pysync.diagnose.proxy import ProxyProbe
from pysync.diagnose.report import Report
from pysync.diagnose.stores import probe_stores

__all__ = ["ProxyProbe", "Report", "probe_machine", "probe_stores"]
