"""Logs its run to an account and a server that its code names, and so ignores the environment."""

import sys

import mlflow
import wandb

SERVER = "http://127.0.0.1:9"  # nothing listens there
mlflow.set_tracking_uri(SERVER)
mlflow.set_experiment("mine")
with mlflow.start_run():
    mlflow.log_metric("loss", 1.0)
print("client:", [each.name for each in mlflow.MlflowClient(tracking_uri=SERVER).search_experiments()])
print("modes:", [wandb.init(project="mine", mode=mode).settings.mode for mode in ("online", None, "disabled")])
print("finders left:", sum("Awaited" in type(finder).__name__ for finder in sys.meta_path), flush=True)
import torch  # noqa: E402

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
