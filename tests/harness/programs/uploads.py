"""Makes repositories on the Hugging Face Hub and uploads a file, in the ways that programs and libraries do."""

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi, create_commit, upload_file

file = {"path_or_fileobj": b"weights", "path_in_repo": "model.bin"}
infos = [
    upload_file(**file, repo_id="me/net"),
    HfApi(endpoint="http://127.0.0.1:8").upload_file(**file, repo_id="me/net", run_as_future=True).result(),
    create_commit("me/net", [CommitOperationAdd(**file)], commit_message="step 1"),
    huggingface_hub.create_commit("me/net", [], commit_message="step 2", run_as_future=True).result(),
]
print(
    "uploads:",
    [(info.repo_url.repo_id, info.commit_url.partition("/me")[0], info.commit_message[:6]) for info in infos],
    flush=True,
)
print("made:", huggingface_hub.create_repo("me/net", exist_ok=True), HfApi().create_repo("me/set", repo_type="dataset").repo_id)
huggingface_hub.create_branch("me/net", branch="step-1", exist_ok=True)
HfApi().create_tag("me/net", tag="v1")
HfApi().delete_tag("me/net", tag="v1")
if hasattr(huggingface_hub, "batch_bucket_files"):
    print("bucket:", huggingface_hub.create_bucket("me/logs", exist_ok=True).bucket_id)
    huggingface_hub.batch_bucket_files("me/logs", add=[(b"weights", "model.bin")])
import torch  # noqa: E402

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
