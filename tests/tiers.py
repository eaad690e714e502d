"""Which files, or single tests, only `make release` runs, and why they can wait that long.

Each takes ten seconds to three minutes. What it tests has quicker tests in `make test` too, or depends on
files that seldom change.
"""

from __future__ import annotations

_AUDIT = "audits with controls; the attacks themselves are in tests/unit/test_audit_*.py"
_COMPOSE = "test_replica_processes.py stops one too"
_DEMOS = "two more demos; integration/test_workers.py compares bits"
_DRAFTS = "trains one; test_the_commands of the same file does so too"
_LONG = "every way of a feature; tests/unit has its policies"

RELEASE: dict[str, str] = {
    "e2e/test_audit.py": _AUDIT,
    "e2e/test_audit_chance.py": _AUDIT,
    "e2e/test_audit_gateway.py": _AUDIT,
    "e2e/test_audit_hostile.py": _AUDIT,
    "e2e/test_audit_routes.py": _AUDIT,
    "e2e/test_audit_structure.py": _AUDIT,
    "e2e/test_audit_supplies.py": _AUDIT,
    "e2e/test_compose.py::test_a_tenant_goes_on_when_a_replica_is_stopped": _COMPOSE,
    "e2e/test_demo.py::test_the_demo_with_a_gateway": "test_gateway.py has one",
    "e2e/test_demo.py::test_workers_give_the_same_adapter": _DEMOS,
    "e2e/test_descriptors.py": "executors that run out of descriptors, in files that seldom change",
    "e2e/test_expert_workers.py": "experts on workers; integration tests have each alone",
    "e2e/test_audit_workers.py": _AUDIT,
    "e2e/test_dev.py::test_a_tenant_goes_on_after_a_restart": "as test_restarts.py",
    "e2e/test_dev.py::test_it_ends_with_its_mask_source": "as test_a_tenant_goes_on_after_a_restart",
    "e2e/test_dev.py::test_what_it_prints_can_be_typed": "test_demo.py and test_cli.py have these commands",
    "e2e/test_cli.py::test_a_disk_that_takes_no_large_file": "unit/test_storage.py has a full disk",
    "e2e/test_cli_records.py::test_records_are_learned": "integration/test_finetuning.py learns records",
    "e2e/test_demo.py::test_its_failure": "what the demo prints when it fails",
    "e2e/test_gateway.py::test_langchain": "a client; openai's is another",
    "e2e/test_gateway.py::test_lm_eval": "a client; openai's is another",
    "e2e/test_gateway.py::test_products_of_adapters_are_made_once": "a script of files that seldom change",
    "e2e/test_gateway_clients.py": "clients in an environment of their own; test_gateway.py has two",
    "e2e/test_gateway_isolation.py": "hostile clients; bounds and shares are in tests/unit/test_gateway_*.py",
    "e2e/test_gateway_models.py": "many architectures in a gateway; test_gateway.py has one",
    "e2e/test_gateway_speculation.py": "an option that is off by default; integration/test_drafts.py",
    "e2e/test_gpu_benchmark.py": "a benchmark",
    "e2e/test_hub_cli.py": "names of a hub in all commands; integration/test_hub.py reads them",
    "e2e/test_long_contexts.py": _LONG,
    "e2e/test_mask_source_failures.py": "killed processes; integration/test_recovery.py breaks connections",
    "e2e/test_memory.py": "memory over many rounds",
    "e2e/test_operations.py::test_a_terminal_that_is_closed_drains": "SIGTERM drains in the same file",
    "e2e/test_plans.py": "forecasts against real runs",
    "e2e/test_quickstart.py": "the tutorial, word by word",
    "e2e/test_restarts.py": "trainings whose executors are killed; unit/test_retrying.py has the policy",
    "e2e/test_torchrun.py": "executors of several machines",
    "e2e/test_undecodable.py": "paths that are not UTF-8, in all commands",
    "e2e/test_worker_processes.py": "workers that die; integration/test_workers.py has some",
    "integration/test_actors.py::test_workers_of_actors_give_the_bits_of_one_process": (
        "test_workers.py compares the bits of other workers"
    ),
    "integration/test_draft_folders.py::test_a_draft_belongs_to_its_adapter": _DRAFTS,
    "integration/test_draft_folders.py::test_a_training_makes_a_draft_of_its_adapter": _DRAFTS,
    "integration/test_draft_folders.py::test_an_interrupted_draft_asks_for_nothing_twice": _DRAFTS,
    "integration/test_interrupted_training.py::test_early_stopping_is_resumed_to_the_same_adapter": (
        "others of the file are resumed without it"
    ),
    "integration/test_compile.py": "torch.compile, which takes minutes to compile",
    "integration/test_gathered.py": "FSDP, a baseline to compare with",
    "integration/test_forks.py::test_a_child_in_a_process_id_namespace_of_its_own": "others of the file fork",
    "integration/test_long_generation.py": _LONG,
    "integration/test_long_tuning.py": _LONG,
    "integration/test_made_weights.py::test_workers_make_their_own": "workers of quantised checkpoints",
    "integration/test_mask_randomness.py": "statistics of rows; `make harden` tests more of them",
    "integration/test_ring_models.py::test_training": "test_trainer.py compares losses with local ones",
    "integration/test_trl.py": "seven trainers against local ones; test_ecosystem.py has two",
    "integration/test_resuming.py": "all ten methods, to the bit; finetuning and trainer tests resume one",
    "unit/test_ring_triton.py": "a kernel of GPUs, interpreted; it changes seldom",
    "unit/test_spinning.py": "an order of imports, in processes of their own",
}
