"""Train on handwritten digits by Ray Train, over a method that does not wait:

python examples/10_ray_train.py
"""

import tempfile

import torch
from ray import init, train
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.lab import digits


def learn(config):
    """What every worker of Ray does; Ray has made the process group before."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train_x, train_y, test_x, test_y = digits.split()
    data = TensorDataset(train_x, train_y)
    # dealt to whoever is free; prepare_data_loader() would divide it beforehand
    loader = DataLoader(data, batch_sampler=offbeat.Deal(data, batch_size=8))

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = prepare_model(model, parallel_strategy=None)  # on its device, without DDP
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    with offbeat.attach(model, optimizer, offbeat.EagerSGD(), clip_norm=1.0) as dp:
        for _ in range(config["epochs"]):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    # after the block, where all have the same model; report() has workers wait for each other
    accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), f"{folder}/model.pt")
        saved = train.Checkpoint.from_directory(folder) if dp.rank == 0 else None
        train.report({"accuracy": accuracy, "workers": dp.world_size}, checkpoint=saved)


if __name__ == "__main__":
    # a Ray of this machine alone; on a cluster, init("auto")
    init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        ended = TorchTrainer(
            learn,
            train_loop_config={"lr": 0.03, "epochs": 8},
            scaling_config=train.ScalingConfig(num_workers=2),
            run_config=train.RunConfig(storage_path=folder),
        ).fit()
    print(f"workers {ended.metrics['workers']}   test accuracy {ended.metrics['accuracy']:.1%}")
