from tests.service.conftest import daemon, raw

__all__ = ["daemon", "raw"]
