"""Wane: serves recurrent next-token models whose memory provably fades."""

import os

# ONNX Runtime reads this variable when it is imported. ONNX Runtime sends telemetry unless the variable is set. A value
# that the operator has set is not changed.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
