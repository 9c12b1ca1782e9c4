"""Kernel tests run Triton in its interpreter where there is no GPU. That is chosen before triton is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
