"""Promises hold where infer's modules see a Mac: a process of its own runs their tests under `mac_mask`, on Linux.

It shows that no module needs a name or a file that macOS lacks. The C library and the processor stay those of Linux.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from extent import usual_or_all

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1]
TESTS = """
cli/test_cli.py::test_a_prompt_comes_from_a_file_or_stdin
cli/test_cli.py::test_a_signal_ends_quietly_with_the_text
cli/test_cli.py::test_bad_input_is_one_line_and_status_2
cli/test_chat_terminal.py::test_ctrl_c_stops_the_answer_and_a_second_one_at_an_empty_prompt_leaves
cli/test_streams.py::test_a_reader_that_has_gone_is_status_141
cli/test_quantize.py::test_a_written_file_has_the_metadata_and_nearly_the_values
cli/test_trace.py::test_the_command_traces_what_generate_says
compute/backends/test_cpu_kernels.py::test_a_recording_gives_the_bits_of_the_ops_one_by_one
compute/backends/test_kernel_cache.py::test_a_full_disk_gives_one_line
compute/backends/test_kernel_cache.py::test_a_process_ignores_forged_files
compute/backends/test_paths.py::test_an_answer_does_not_depend_on_the_way
compute/backends/test_threads.py::test_an_idle_pool_uses_no_processor_time
compute/kvcache/test_eviction.py::test_a_cache_that_evicts_gives_the_answer_of_no_cache
compute/kvcache/test_prefix_store.py::test_a_stored_page_is_found_by_its_name_and_by_another_process
compute/kvcache/test_prefix_store.py::test_processes_that_share_a_folder_and_are_killed_leave_whole_pages_within_the_budget
engine/test_preparing.py::test_a_process_that_dies_once_over_a_question_is_asked_again
engine/session/test_saved_session.py::test_a_new_process_has_equal_tokens
engine/session/test_session.py::test_a_fork_goes_its_own_way
engine/tensor_parallel/test_tensor_parallel.py::test_answers_are_those_of_one_rank
engine/test_async_llm.py::test_every_call_answers_as_that_of_the_llm
engine/test_calls.py::test_a_cache_holds_memory_only_where_it_was_written
engine/test_calls.py::test_a_list_of_texts_is_answered_with_a_list
engine/test_calls.py::test_the_number_of_threads_changes_no_token
engine/test_closing.py::test_a_closed_model_refuses_every_call_in_one_line
engine/test_embedding.py::test_the_mean_and_the_last_are_those_of_the_hidden_states
engine/test_fork.py::test_a_fork_while_other_threads_answer_harms_no_answer
engine/test_fork.py::test_every_call_of_a_child_is_refused_in_one_line
engine/test_generate.py::test_a_stop_string_across_tokens_is_cut_and_never_shown
engine/test_interruptions.py::test_a_session_keeps_its_answer_after_ctrl_c_and_continues
engine/test_loop.py::test_an_idle_loop_uses_no_processor_time_and_begins_again
engine/test_many_at_once.py::test_every_answer_under_load_is_as_alone
engine/test_prefix_disk.py::test_a_second_process_finds_what_the_first_one_read
engine/test_reranking.py::test_documents_come_by_score_and_equal_ones_by_place
files/test_family_files.py::test_a_converted_file_gives_the_logits_of_the_folder
files/test_open_file.py::test_a_file_that_is_written_to_while_it_is_loaded_is_refused
files/test_open_file.py::test_no_file_of_a_model_is_mapped_while_it_is_loaded_or_after
files/test_hostile_files.py::test_a_process_that_is_killed_while_it_writes_leaves_the_old_file_or_the_new_one
models/catalog/test_doctor.py::test_healthy_files_have_no_faults
models/test_available_memory.py::test_if_memory_is_short_the_default_context_is_the_part_that_fits
models/test_families.py::test_logits_equal_transformers_at_every_position_for_any_chunk
models/test_memory.py::test_a_context_that_does_not_fit_is_refused_with_one_that_would
models/test_memory.py::test_the_command_says_whether_it_fits
serving/batch_file/test_batch_file.py::test_a_result_is_a_line_without_a_clock
serving/distributed/test_failover.py::test_a_request_waits_while_no_replica_is_ready_and_is_answered_by_the_next
serving/distributed/test_replicas.py::test_a_child_ends_with_its_parent_whatever_it_does
serving/distributed/test_replicas.py::test_clients_notice_no_kill
serving/distributed/test_shelf.py::test_a_pinned_model_stays_and_an_idle_one_is_unloaded_after_its_time
serving/server/test_hostile_clients.py::test_a_client_that_goes_away_frees_its_slot
system/test_user_cache.py::test_kernels_run_without_a_home
text/grammar/test_budgets.py
text/tokenizer/test_templates.py::test_a_bomb_is_one_line_and_the_next_conversation_works
text/toolcalls/test_tool_calls.py::test_a_required_call_is_made_streamed_and_the_same_in_a_batch
"""


def test_promises_hold_without_what_macos_lacks(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import mac_mask\n\nmac_mask.install()\n")
    paths = [str(tmp_path), str(FOLDER / "helpers"), *filter(None, sys.path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "INFER_TESTS": "promises"}
    tests = [str(FOLDER / test) for test in TESTS.split()[:: usual_or_all(6, 1)]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
