"""The shim, in processes of their own: it patches torch for good, as it has in those from which ranks are forked."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing where CUDA is present")


def test_cuda_means_the_cpu(run_ranks):
    run_ranks(
        1,
        "-c",
        "import torch; from megadit.models.megatron import cpu_shim; cpu_shim.install()\n"
        "x = torch.zeros(3, device='cuda')\n"
        "assert x.device.type == 'cpu' and x.to('cuda').device.type == 'cpu' and x.cuda() is x\n"
        "assert x.new_empty(2, device='cuda:1', pin_memory=True).device.type == 'cpu'\n"
        "assert torch.empty(1, device=torch.cuda.current_device()).device.type == 'cpu'\n"
        "assert x.type() == 'torch.cuda.FloatTensor' and x.type(torch.float64).dtype == torch.float64\n"
        "assert x.to(torch.float64).dtype == torch.float64\n"
        "with torch.device('meta'): assert torch.zeros(3).is_meta and not torch.empty(3, device='cuda').is_meta\n"
        "with torch.cuda.stream(torch.cuda.Stream()): torch.cuda.synchronize()",
    )


def test_installing_twice_changes_nothing(run_ranks):
    run_ranks(
        1,
        "-c",
        "import torch; from megadit.models.megatron import cpu_shim; cpu_shim.install()\n"
        "before = torch.zeros, torch.Tensor.to, torch.distributed.all_gather\n"
        "cpu_shim.install()\n"
        "assert before == (torch.zeros, torch.Tensor.to, torch.distributed.all_gather)",
    )


def run(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr


def test_importing_patches_nothing_and_optimizers_of_megatron_need_it():
    """The control: without the shim Megatron's optimizer does not start on a CPU."""
    run(
        "import torch; zeros, to = torch.zeros, torch.Tensor.to\n"
        "from megadit.models.megatron import cpu_shim\n"
        "assert torch.zeros is zeros and torch.Tensor.to is to\n"
        "from megatron.core.optimizer.optimizer import FP32Optimizer\n"
        "try: FP32Optimizer(torch.optim.SGD([torch.zeros(1)], lr=1.0), None, None)\n"
        "except (AssertionError, RuntimeError): pass\n"
        "else: raise SystemExit('it started')"
    )


def test_megatron_comes_without_compiler_and_wandb_which_others_may_import():
    run(
        "import sys, torch; compiler = torch.compile\n"
        "from megadit.models.megatron import cpu_shim; cpu_shim.install()\n"
        "assert {'megatron.core.optimizer'} <= {*sys.modules} and not {'torch._dynamo', 'wandb'} & {*sys.modules}\n"
        "assert torch.compile is compiler\n"
        "from megatron.core.jit import jit_fuser\n"
        "assert jit_fuser(run := lambda x: x + 1) is run and jit_fuser(dynamic=True)(run) is run\n"
        "import importlib.util; assert importlib.util.find_spec('wandb') is None or __import__('wandb').__version__\n"
    )
