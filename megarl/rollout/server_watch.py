"""What the server adds to vLLM's process, which would otherwise outlive a server that is killed, and keep its memory."""

from __future__ import annotations

import multiprocessing
import os
import threading


class EndsWithParent:
    """Mixed into vLLM's worker (``worker_extension_cls``), which on one device lives in the engine's process."""

    def megarl_end_with_parent(self) -> None:
        """End this process when the one that started it is gone."""
        parent = multiprocessing.parent_process()

        def watch() -> None:
            parent.join()
            os._exit(1)  # nothing here is worth saving, and an orderly exit could hang on the lost peer

        if parent is not None:
            threading.Thread(target=watch, name="ends with parent", daemon=True).start()
