"""ONNX files that Wane did not write: read with limits, run for the first time in a process of their own, and turned
into bundles. Needs the package `onnx`."""
