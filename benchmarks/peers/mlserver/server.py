"""MLServer: a server of the Open Inference Protocol. It batches requests and passes the batches to the runtime."""

from __future__ import annotations

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.peers.window_model import WindowModel


class Window(MLModel):
    """A custom runtime. MLServer's documentation recommends one for models that no included runtime supports."""

    async def load(self) -> bool:
        self.model = WindowModel.served()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        tokens = NumpyCodec.decode_input(payload.inputs[0])
        ids, probabilities = self.model.top(tokens)
        return InferenceResponse(
            model_name=self.name,
            outputs=[
                NumpyCodec.encode_output("token_id", ids),
                NumpyCodec.encode_output("probability", probabilities),
            ],
        )
