"""Logs to its own MLflow store."""

import mlflow

with mlflow.start_run(run_name="mine"):
    mlflow.log_metric("loss", 0.5)
