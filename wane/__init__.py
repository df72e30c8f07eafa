"""Wane: serves recurrent next-token models whose memory provably fades."""

import os

# ONNX Runtime reads this when it is imported, and sends telemetry unless it is set. An operator's own value stays.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
