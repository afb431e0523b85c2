"""Which command-line flag sets which setting.

Owns that table alone. Called by the command line, which makes the flags from it, and by
``reference``, which prints it.
"""

from collections.abc import Mapping

__all__ = ["FLAGS", "TLS_FLAGS"]

FLAGS: Mapping[str, str] = {
    "--host": "scheduler.host",
    "--port": "scheduler.port",
    "--interface": "scheduler.interface",
    "--protocol": "scheduler.protocol",
    "--tls-ca-file": "comm.tls.ca-file",
    "--tls-cert": "comm.tls.scheduler-cert",
    "--tls-key": "comm.tls.scheduler-key",
    "--dashboard-address": "http.address",
    "--dashboard": "http.dashboard",
    "--dashboard-prefix": "http.prefix",
    "--pid-file": "scheduler.pid-file",
    "--scheduler-file": "scheduler.scheduler-file",
    "--idle-timeout": "scheduler.idle-timeout",
    "--log-level": "logging.level",
    "--log-format": "logging.format",
}

TLS_FLAGS: tuple[str, ...] = (
    "comm.tls.ca-file",
    "comm.tls.scheduler-cert",
    "comm.tls.scheduler-key",
)
"""Settings whose flags ask for encryption by being there, as with Dask."""
