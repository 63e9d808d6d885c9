"""TD3 on a vectorised pendulum. python -m td3.train [--updates N]"""

import argparse
import collections
import copy
import itertools
import logging
import os
import time

import journal
import numpy as np
import torch
import torch.nn.functional as F

from .buffer import Prefetcher, Replay
from .nets import Actor, Critic

log = logging.getLogger("td3")


class Pendulums:
    def __init__(self, n, seed):
        self.rng, self.n = np.random.default_rng(seed), n
        self.state = self.rng.uniform(-1, 1, (n, 8)).astype(np.float32)

    def step(self, act):
        force = np.repeat(act, 4, 1)
        vel = self.state[:, 4:] + 0.05 * (force - np.sin(3 * self.state[:, :4]))
        pos = self.state[:, :4] + 0.05 * vel
        self.state = np.clip(np.concatenate([pos, vel], 1), -3, 3).astype(np.float32)
        reward = -(pos**2).sum(1) - 0.1 * (act**2).sum(1)
        done = self.rng.random(self.n) < 0.01
        seen = self.state.copy()
        self.state[done] = self.rng.uniform(-1, 1, (done.sum(), 8))
        return seen, reward.astype(np.float32), done.astype(np.float32)


@torch.no_grad()
def soft_update(target, source, tau):
    for t, s in zip(target.parameters(), source.parameters(), strict=True):
        t.data.mul_(1 - tau).add_(s.data, alpha=tau)


def collect(env, actor, replay, noise, rng):
    with torch.no_grad():
        act = actor(torch.from_numpy(env.state)).numpy()
    act = np.clip(act + noise * rng.standard_normal(act.shape), -1, 1).astype(np.float32)
    before = env.state.copy()
    after, rew, done = env.step(act)
    replay.add(before, act, rew, after, done)
    return rew.mean()


def update_critic(batch, nets, opt, gamma):
    actor_t, critic, critic_t = nets["actor_t"], nets["critic"], nets["critic_t"]
    with torch.no_grad():
        noise = (torch.randn_like(batch["act"]) * 0.2).clamp(-0.5, 0.5)
        act = (actor_t(batch["next_obs"]) + noise).clamp(-1, 1)
        target = batch["rew"] + gamma * (1 - batch["done"]) * torch.min(*critic_t(batch["next_obs"], act))
    q1, q2 = critic(batch["obs"], batch["act"])
    loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(critic.parameters(), 10.0)
    opt.step()
    return loss


def update_actor(batch, nets, opt):
    nets["critic"].requires_grad_(False)
    loss = -nets["critic"](batch["obs"], nets["actor"](batch["obs"]))[0].mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    nets["critic"].requires_grad_(True)
    return loss


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--updates", type=int, default=10**6)
    p.add_argument("--batch-size", type=int, default=int(os.environ.get("TD3_BATCH", 256)))
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--envs", type=int, default=8)
    p.add_argument("--policy-delay", type=int, default=2)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    env, replay = Pendulums(args.envs, args.seed), Replay(50_000, 8, 1)
    nets = {"actor": Actor(8, 1, args.hidden), "critic": Critic(8, 1, args.hidden)}
    nets |= {k + "_t": copy.deepcopy(v).requires_grad_(False) for k, v in nets.items()}
    opts = {k: torch.optim.Adam(nets[k].parameters(), lr=args.lr) for k in ("actor", "critic")}
    for _ in range(200):
        collect(env, nets["actor"], replay, 1.0, rng)
    log.info("filled %d, batch %d, threads %d", replay.size, args.batch_size, torch.get_num_threads())
    # sampled from the first experiences only, so that the run does not depend on the thread's timing
    batches = Prefetcher(copy.deepcopy(replay), args.batch_size, args.seed)
    rewards, t0, last = collections.deque(maxlen=100), time.perf_counter(), 0
    aloss = torch.zeros(())
    try:
        for n, batch in zip(itertools.count(1), batches):
            rewards.append(collect(env, nets["actor"], replay, 0.1, rng))
            nets["critic"].peek = n in (4, 60)
            closs = update_critic(batch, nets, opts["critic"], 0.99)
            nets["critic"].peek = False
            if n % args.policy_delay == 0:
                aloss = update_actor(batch, nets, opts["actor"])
                soft_update(nets["actor_t"], nets["actor"], 0.005)
                soft_update(nets["critic_t"], nets["critic"], 0.005)
            journal.step(closs, len(batch["obs"]), opts["critic"])
            if n % 100 == 0:
                now = time.perf_counter()
                rate = (n - last) * len(batch["obs"]) / (now - t0)
                log.info("update %d critic %s actor %s", n, closs.item().hex(), aloss.item().hex())
                log.info("reward %.3f | %.1f transitions/s t %.3f", np.mean(rewards), rate, now)
                t0, last = now, n
            if n % 2000 == 0:
                journal.away()
                torch.save({k: v.state_dict() for k, v in nets.items()}, "td3.pt")
            if n >= args.updates:
                break
    finally:
        batches.close()
    print("finished", args.updates, flush=True)


if __name__ == "__main__":
    main()
