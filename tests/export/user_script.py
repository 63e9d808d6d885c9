"""A small training script that imports the exported `best.py` and prints the state of every knob."""

import json

import best
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    best.start()
    model = best.prepare(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 2)))
    torch.compiler.set_stance("force_eager")  # shows whether the model is compiled, without compiling it
    model(torch.randn(1, 3, 8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **best.OPTIMIZER)
    loader = DataLoader(TensorDataset(torch.randn(32, 3, 8, 8), torch.randint(2, (32,))), shuffle=True, **best.LOADER)
    for images, targets in loader:
        images = best.prepare_images(images)
        with best.autocast("cpu"):
            output = model(images)
        loss = torch.nn.functional.cross_entropy(output.float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    wrapped = DistributedDataParallel(torch.nn.Linear(2, 2), **best.PARALLEL)
    best.compress(wrapped)
    print(
        json.dumps(
            {
                "before": before,
                "threads": torch.get_num_threads(),
                "matmul": torch.get_float32_matmul_precision(),
                "benchmark": torch.backends.cudnn.benchmark,
                "loader": [loader.batch_size, loader.num_workers, loader.prefetch_factor, loader.persistent_workers],
                "others": [
                    loader.in_order,
                    loader.multiprocessing_context.get_start_method(),
                    torch.multiprocessing.get_sharing_strategy(),
                    torch.get_num_interop_threads(),
                ],
                "weights": model[0].weight.is_contiguous(memory_format=torch.channels_last),
                "images": images.is_contiguous(memory_format=torch.channels_last),
                "output": str(output.dtype),
                "is_compiled": model._compiled_call_impl is not None,
                "fused": optimizer.param_groups[0]["fused"],
                "wrapped": [
                    wrapped.bucket_bytes_cap >> 20,
                    wrapped.static_graph,
                    wrapped.gradient_as_bucket_view,
                    [hook.__name__ for hook, _ in wrapped._comm_hooks],
                ],
                "loss": loss.item(),
            }
        )
    )


if __name__ == "__main__":
    main()
