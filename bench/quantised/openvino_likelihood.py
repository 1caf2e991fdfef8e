"""openvino_likelihood.py MODEL FOLDER THREADS: measures an exported model on the windows of FOLDER.

Runs in OpenVINO's virtual environment. Prints the result of likelihood.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import openvino
from likelihood import Array, report

BITS = {"u4": 4, "i4": 4, "u8": 8, "i8": 8, "f16": 16, "bf16": 16, "f32": 32}


def main(directory: Path, folder: Path, threads: int) -> None:
    """Measures one model, in bfloat16 like its speed."""
    core = openvino.Core()
    model = core.read_model(directory / "openvino_model.xml")
    bits = bits_of_layers(model)
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16"}
    request = core.compile_model(model, "CPU", settings).create_infer_request()

    def logits_of(ids: list[int]) -> Array:
        request.reset_state()
        row = np.array([ids], np.int64)
        inputs = {
            "input_ids": row, "attention_mask": np.ones_like(row), "position_ids": np.arange(len(ids))[None],
            "beam_idx": np.zeros(1, np.int32),
        }  # fmt: skip
        return np.array(request.infer(inputs)["logits"][0])

    report(folder, logits_of, bits)


def bits_of_layers(model: openvino.Model) -> float:
    """Bits per weight of the layers' matrices, including scales and zero points."""
    weights = bits = 0
    for constant in model.get_ops():
        name = constant.get_friendly_name()
        if constant.get_type_name() == "Constant" and ".layers." in name and "proj" in name:
            count = int(np.prod(constant.get_output_shape(0)))
            bits += count * BITS[constant.get_element_type().get_type_name()]
            if "scale" not in name and "zero_point" not in name:
                weights += count
    return bits / weights


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
