"""Wane: serves recurrent next-token models whose memory provably fades."""

import os

# ONNX Runtime reads this variable when it is imported. It sends telemetry unless the variable is set. A value that the
# operator has set is kept.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
