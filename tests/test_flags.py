"""Every flag of every command does something: each is named here with a test that gives it and sees what it does.

The flags are those of the real parsers. A flag without a test fails, and so does a test that is not there, or that
does not give its flag: neither itself, nor through the fixtures, functions and tables that it uses.
"""

import ast
import re
import shlex
from contextlib import suppress
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from megadit.models.shared.cli import verbs
from megadit.models.shared.cli.options import MOST_IN_ONE_LIST, CommandParser

ROOT = Path(__file__).parent
MADE = "infer/test_flags.py::test_an_option_changes_what_is_made"
CALIBRATED = "infer/test_flags.py::test_an_option_changes_what_is_calibrated"
SELECTED = "train/data/ingest/test_flags.py::test_an_option_changes_what_is_selected"
FOLDER = "train/data/ingest/test_flags.py::test_given_encoders_and_processes"
DOWNLOAD = "train/data/ingest/sources/test_download.py"
VIDEOS = "train/data/ingest/test_videos.py"
EVALUATE = "infer/evaluate/test_command.py"
RANKS = "infer/inspect/test_interconnect.py"
REQUEST = "serve/test_flags.py::test_every_option_reaches_the_service"
DEBUG = {"models/shared/cli/test_verbs.py::test_debug_shows_the_traceback": "--debug"}

GENERATE = """
    --checkpoint_path --repeat --recorded_files --prompt --prompt_file --subject_name --seed --seeds --num_video_frames
    --height --width --fps --input_video --strength --continue_video --keep_frames --negative_prompt --guidance
    --guidances --guidance_convention --guidance_interval --guidance_rescale --autoguidance --second_prompt
    --second_guidance --sampler --num_steps --schedule --sigmas --sigma_min --sigma_max --rho --shift --noise_scale
    --churn --churn_interval --eta --cache_budget --cache_measure --lpips_weights --video_save_path --format
    --contact_sheet --batch_size --device --dtype --runtime --sequential_guidance --offload_text_encoder --compile
    --cuda_graphs --resident_blocks --overlap_decoding --tokenizer_model --tokenizer_cache_dir --t5_cache_dir
    --num_devices --tp_size --cp_size --cfg_parallel --guardrail_dir --adapter --adapter_interval --lead_to_video
    --image --last_image --keyframe --video --mask --instruction --image_guidance --total_frames --story --keep_first
    --low_guidance --dry_run --device_memory --even_if_too_large
"""
SIZE = {"models/shared/cli/test_options.py::test_a_size_stands_for_height_and_width": "--size"}
SIGNED, C2PA = "infer/media/test_signing.py", "--c2pa_certificate --c2pa_key"
ACCOUNT = "train/data/ingest/test_account.py"
INGEST = SIZE | {
    SELECTED: """
        --sizes --fps --cut --scene_threshold --min_brightness --min_motion --overlap --max_duplicate_bits --max_minutes
        --val_share --seed --min_contrast --max_megapixels --duplicates --background
    """,
    FOLDER: "--tokenizer --text_encoder --num_workers",
    f"{VIDEOS}::test_samples_hold_what_their_videos_show": "--height --width --num_frames",
    f"{VIDEOS}::test_frames_are_encoded_as_images_too": "--keyframes",
    f"{VIDEOS}::test_shards_of_a_split_are_equally_large": "--shard_size",
    f"{VIDEOS}::test_pixels_can_be_stored_instead": "--store",
    "train/data/ingest/clips/test_source_media.py::test_files_stay_as_they_were_and_cut_clips_are_kept_as_cut": (
        "--source_media"
    ),
    f"{VIDEOS}::test_an_image_is_a_video_of_one_frame": "--channels --min_aesthetic_score",
    "train/data/ingest/clips/test_fitting.py::test_pictures_whose_caption_fits_less_are_left_out": "--min_clip_score",
    "train/data/ingest/test_update.py::test_an_update_leaves_what_a_fresh_preparation_leaves": "--update",
    f"{ACCOUNT}::test_the_sums_of_a_report_add_up": "--max_caption_words",
    "train/data/ingest/test_not_in.py::test_what_another_data_set_holds_is_left_out": "--not_in",
    "train/data/ingest/test_few_clips.py::test_clips_of_training_stand_beside_their_mirror_images": "--mirror",
    "train/data/ingest/test_few_clips.py::test_one_caption_for_all_that_have_none": "--default_caption",
    "train/data/ingest/clips/test_flow.py::test_slow_clips_are_left_out_with_their_speed": "--min_flow",
    "train/data/ingest/clips/test_captions.py::test_frames_of_a_video_are_shown_in_their_order": "--caption_frames",
    "train/data/ingest/clips/test_captions.py::test_clips_without_a_caption_get_one": (
        "--caption_server --caption_model --caption_prompt"
    ),
    "train/data/ingest/clips/test_captions.py::test_as_many_are_under_way_as_asked_for": "--caption_requests",
    "train/data/ingest/clips/test_captions.py::test_a_busy_server_is_asked_again_and_a_hanging_one_given_up": (
        "--caption_seconds"
    ),
    "train/data/ingest/clips/test_scoring.py::test_clips_beyond_a_limit_are_left_out_with_their_score": (
        "--scorer_dir --min_score --max_score"
    ),
    f"{VIDEOS}::test_stages_run_alone_and_name_the_one_before": "--stages",
    f"{VIDEOS}::test_a_second_run_does_nothing_and_a_shard_can_be_made_again": "--redo",
    f"{DOWNLOAD}::test_parts_in_any_order_leave_what_one_process_leaves": "--shard",
    "train/data/ingest/test_engine.py::test_tasks_of_ray_leave_the_same_bytes": "--engine --engine_tasks",
    "train/data/ingest/clips/test_encodings.py::test_all_encodings_of_the_file_are_stored": "--encodings",
    "train/data/ingest/test_flags.py::test_a_preparation_is_begun_anew": "--overwrite",
}
FETCHED = {f"{DOWNLOAD}::test_downloads_obey_their_options": "--downloads --download_seconds --private_addresses"}
READING = {f"{ACCOUNT}::test_how_captions_are_read": "--caption_columns --caption_encoding --follow_links"}
CAPTIONED = {SELECTED: f"{INGEST[SELECTED]} --captions", f"{ACCOUNT}::test_splits_stay_apart": "--split"} | READING
TABLES = "train/data/ingest/test_flags.py::test_tables_of_a_split_into_a_folder_of_its_own"
COLUMN = "train/data/ingest/sources/test_sources.py::test_images_inside_tables_and_a_chosen_column_of_captions"
IMPORTED = {
    "train/data/ingest/sources/test_sources.py::test_what_nemo_and_dfm_wrote_becomes_a_data_set": (
        "--tokenizer --text_encoder --fps --val_every --shard_size --overwrite"
    )
}

SHOWN_BY = {
    "prepare digits": {
        "train/data/prepare/test_command.py::test_counts": "--num_clips --num_images --num_val",
        "train/data/prepare/test_command.py::test_the_seed_decides_the_files": "--seed",
        "train/data/prepare/test_command.py::test_a_finished_folder_is_replaced_on_demand": "--overwrite",
    },
    **dict.fromkeys(
        tuple(f"prepare digit_{name}" for name in ("classes", "captions", "clips", "images", "images_64")),
        {"train/data/prepare/test_command.py::test_digits_one_to_a_picture": "--num_images --seed --overwrite"},
    ),
    "prepare shapes": {
        "train/demos/shapes/test_samples.py::test_every_option_reaches_the_data_set": (
            "--num_clips --num_images --num_val --seed"
        ),
        "train/data/prepare/test_command.py::test_a_finished_folder_is_replaced_on_demand": "--overwrite",
    },
    "prepare dummy_images": {
        "train/data/prepare/test_dummy_images.py::test_what_nemo_s_documents_say": "--num_images --size",
        "train/data/prepare/test_dummy_images.py::test_options_decide_the_pictures": "--seed --overwrite",
        "train/data/prepare/test_dummy_images.py::test_another_factory_is_refused": "--factory",
    },
    "prepare videos": INGEST | CAPTIONED,
    "prepare images": INGEST | CAPTIONED,
    "prepare webdataset": INGEST | READING,
    "prepare hf": INGEST | FETCHED | READING | {TABLES: "--split"},
    "prepare butterfly": INGEST | FETCHED | READING | {TABLES: "--split --source --output_dir"},
    "prepare nemo": IMPORTED,
    "prepare bridge": IMPORTED,
    "prepare automodel": IMPORTED,
    "prepare prior": SIZE
    | {
        "train/data/prepare/test_prior.py::test_every_option_reaches_the_samples": """
            --prompt --prompt_file --count --seed --batch_size --device --dtype --overwrite --sampler --num_steps
            --guidance --num_video_frames --height --width --fps --negative_prompt --eta --churn
        """
    },
    "prepare trajectories": SIZE
    | {
        "train/data/prepare/test_prior.py::test_every_option_reaches_the_samples": """
            --prompt --prompt_file --count --seed --batch_size --device --dtype --overwrite --sampler --num_steps
            --guidance --num_video_frames --height --width --fps --negative_prompt --eta --churn
        """
    },
    "prepare rollouts": SIZE
    | {
        "train/data/prepare/test_rollouts.py::test_every_option_reaches_the_samples": """
            --prompt --prompt_file --seed --batch_size --device --dtype --num_video_frames --watch_dir --adapter
            --overwrite --sampler --num_steps --guidance --height --width --fps --negative_prompt --eta --churn
        """,
        "train/data/prepare/test_rollouts.py::test_samples_have_rewards_relative_to_their_group": (
            "--scorer_dir --group_size --reward --scorer_seconds"
        ),
        "train/data/prepare/test_rollouts.py::test_clip_and_optical_flow_are_rewarded_without_a_program": "--clip",
        "train/data/prepare/test_rollouts.py::test_diversity_is_that_of_an_extractors_features": "--extractors",
        "train/data/prepare/test_rollouts.py::test_steps_from_kept_states_are_those_that_the_sampler_took": "--states",
    },
    **dict.fromkeys(
        ("prepare edits", "prepare preferences"),
        {
            "train/data/prepare/test_pairs.py::test_videos_are_cut_alike": "--fps --num_frames",
            "train/data/prepare/test_pairs.py::test_a_second_run_goes_on_and_another_is_refused": (
                "--tokenizer --text_encoder --size --val_share --overwrite"
            ),
        },
    ),
    "train": {
        "train/test_flags.py::test_options_reach_the_run": (
            "--recipe --config-file --mock --dataset-path --yes --print-config"
        ),
        "train/test_flags.py::test_options_of_the_command": "--nproc --dry-run",
        "train/plan/test_plan.py::test_plan_says_the_best_layout_why_and_what_does_not_fit": "--plan --gpus --gpu",
        "train/plan/test_tune.py::test_the_faster_of_two_on_two_ranks_trains": (
            "--tune --top --tune_steps --tune_seconds"
        ),
        "train/plan/test_budget.py::test_it_is_printed": "--explain",
        "train/checkpoints/test_fixed_settings.py::test_a_run_that_cannot_fit_is_refused_before_anything_is_written": (
            "--even_if_too_large"
        ),
    }
    | DEBUG,
    "slurm": {
        "train/slurm/test_slurm.py::test_dry_run_submits_nothing": "--config-file --dry-run",
        "train/slurm/test_slurm.py::test_the_resolved_configuration_is_shown_and_nothing_written": "--print-config",
        "train/slurm/test_stages.py::test_a_stage_alone_waits_for_what_is_in_the_queue": "--stages",
        "train/slurm/test_stages.py::test_only_what_failed_runs_again": "--failed",
        "train/slurm/test_stages.py::test_the_same_chain_runs_here": "--local --at_once",
        "train/slurm/test_kubernetes.py::test_jobs_run_in_the_order_of_the_chain": "--kubernetes",
        "train/slurm/test_validate.py::test_a_bad_node_is_excluded_from_the_next_stage": (
            "--nodes --nodelist --partition"
        ),
    },
    "bundle": {
        "train/checkpoints/test_to_bundle.py::test_averages_and_steps_are_chosen": "--ema --step",
        "train/checkpoints/test_to_bundle.py::test_the_data_set_may_lie_elsewhere": "--dataset",
        "train/checkpoints/test_to_bundle.py::test_defaults_are_chosen": "--default",
        "infer/pipeline/test_adapters.py::test_merged_equals_unmerged": "--merge",
        "models/convert/test_average.py::test_it_is_the_mean_of_the_weights": "--average",
    },
    "convert": {
        "models/convert/test_pipelines.py::test_licences_travel_and_a_bundle_becomes_a_pipeline_again": "--to",
        "models/convert/test_sources.py::test_parts_that_do_not_fit_name_both_sides": "--tokenizer --text_encoder",
        "models/convert/test_sources.py::test_the_precision_is_chosen": "--dtype",
        "models/convert/test_conditioning.py::test_a_network_that_reads_images_needs_its_clip": "--image_encoder",
        "infer/pipeline/test_adapters.py::test_convert_there_and_back": "--base",
        "models/tokenizers/test_released_cosmos.py::test_a_compression_is_taken_if_it_fits": "--compression",
    },
    "push": {},
    "pull": {},
    "generate": SIZE | {MADE: GENERATE, f"{SIGNED}::test_generated_files_are_signed_and_repeated": C2PA},
    "classify": {
        "infer/commands/test_classify.py::test_every_option_reaches_what_is_named": (
            "--top --labelled --out --batch_size --runtime --device"
        ),
        "infer/commands/test_similarity.py::test_labels_and_prompts_name_pictures": "--labels --prompts",
    },
    "similarity": {
        "infer/commands/test_similarity.py::test_every_option_reaches_what_is_told": (
            "--out --batch_size --runtime --device"
        ),
    },
    "calibrate-cache": SIZE | {CALIBRATED: GENERATE, f"{SIGNED}::test_what_writes_nothing_signs_nothing": C2PA},
    "check-cache": SIZE | {CALIBRATED: GENERATE, f"{SIGNED}::test_what_writes_nothing_signs_nothing": C2PA},
    "evaluate": {
        f"{EVALUATE}::evaluated": "--real --out --extractors --metrics --guidances",
        "infer/evaluate/metrics/test_scorer.py::test_somebody_elses_videos_are_judged": "--scorer_dir",
        f"{EVALUATE}::test_two_folders_against_each_other": "--videos --against",
        f"{EVALUATE}::test_a_model_against_a_folder_with_a_shared_cache": """
            --prompts --count --seed --frames --size --features --export_for --device --dtype --guidance --num_steps
            --num_video_frames
        """,
        f"{EVALUATE}::test_settings_reach_the_videos": "--sampler --height --width --negative_prompt --eta",
        f"{EVALUATE}::test_mistakes_are_one_line_that_says_what_to_do": "--fps",
        "serve/gateway/test_evaluate.py::test_a_service_makes_the_videos_of_its_bundle_and_they_are_kept": "--key_file",
    },
    "distill": {
        "train/distill/test_command.py::test_every_option_reaches_its_part": """
            --data --recipe --config-file --stages --calls --sigmas --guidance --nproc --prompts --count --extractors
            --spread --distance --device --pairs --num_trajectories --trajectory_steps
            --guidance_embedding_range --noise_scale
        """,
        "train/distill/test_command.py::test_stages_of_adapters_leave_an_adapter_that_says_how_it_is_called": (
            "--adapter_rank"
        ),
        "train/distill/test_command.py::test_a_stage_that_cannot_fit_is_refused": "--even_if_too_large",
    },
    "reward": {
        "train/reward/test_command.py::test_every_option_reaches_its_part": """
            --prompts --scorer_dir --watch_dir --reward --rounds --prompts_per_round --group_size --train_steps --beta
            --seed --scorer_seconds --clip --recipe --config-file --nproc --check_prompts --check_interval --count
            --extractors --real --device --even_if_too_large --sampler --num_steps --guidance
        """,
        "train/reward/test_command.py::test_rounds_follow_one_another_and_go_on_where_they_were": (
            "--adapter_rank --spread --moved --objective --states --eta"
        ),
        "train/reward/test_command.py::test_a_reward_that_is_cheated_ends_the_run": "--distance",
        "train/reward/test_command.py::test_a_policy_is_an_average_and_training_goes_on_from_its_own_weights": (
            "--policy_decay"
        ),
    },
    "tune-sampler": {
        "infer/commands/test_tune_sampler.py::test_the_command_changes_the_bundle": """
            --real --prompts --out --extractors --metrics --function_evaluations --guidance --budget --count --device
            --dtype --dry_run --noise_scale
        """,
        "infer/evaluate/metrics/test_scorer.py::test_the_cheapest_way_to_sample_is_found_by_a_judge_alone": (
            "--scorer_dir"
        ),
    },
    "evaluate tokenizer": {
        f"{EVALUATE}::test_a_tokenizer_is_measured": "--out --frames --size --count --lpips_weights",
    },
    "evaluate compare": {},
    "evaluate convert": {},
    "export": {
        "export/test_export.py::test_every_option_reaches_the_export": """
            --format --precision --profile --opset --calibration_prompts --no_text_encoder --video_steps --default
            --adapter_rank --adapter_targets
            --workspace_gb --optimization_level --timing_cache --refittable --version_compatible --hardware_compatible
            --weight_streaming
        """,
        "export/test_to_tensorrt.py::test_engines_of_an_earlier_export_take_new_weights": "--refit",
        "export/test_export.py::test_an_export_that_cannot_fit_is_refused": "--even_if_too_large",
    },
    "benchmark train": {
        "train/benchmarks/test_train.py::test_figures_agree_with_each_other": (
            "--recipe --steps --warmup --ops --trace --json"
        ),
        "train/benchmarks/test_train.py::test_options_of_the_steps_reach_them": "--config-file --nproc",
        "train/checkpoints/test_fixed_settings.py::test_steps_that_cannot_fit_are_not_measured": "--even_if_too_large",
    }
    | DEBUG,
    "benchmark growth": {
        "train/benchmarks/test_train.py::test_options_of_growth_choose_its_points": "--along --steps --points",
    },
    "benchmark scaling": {
        "train/benchmarks/test_scaling.py::test_ranks_of_this_machine_are_measured": "--recipe --ranks --steps",
        "train/benchmarks/test_scaling.py::test_figures_of_a_cluster_are_rows": "--packs",
    },
    "benchmark cpu": {
        "export/benchmark_cpu_cases.py::test_every_contestant_samples_and_is_compared": "--rounds --threads --json",
    },
    "benchmark generate": SIZE
    | {
        "infer/benchmarks/test_generate.py::test_figures_of_a_bundle": "--trace --json",
        "infer/benchmarks/test_generate.py::test_options_reach_what_is_timed": """
            --runtime --rounds --device --dtype --prompt --num_steps --num_frames --height --width
        """,
    },
    "serve build-repository": {
        "serve/test_flags.py::test_every_option_changes_the_repository": """
            --images --dtype --device --instances --max_batch_size --max_queue_size --queue_seconds --batching_seconds
            --max_prompt_characters --max_text_tokens --max_videos --max_frames --max_pixels --max_work
            --max_media_bytes --max_media_pixels --max_media_frames --max_media_side --max_media_seconds
            --max_adapters --max_adapter_bytes --max_adapter_rank --adapters --adapter_bytes --guardrail_dir
            --scorer_dir
        """,
        "serve/test_ranks.py::test_options_of_ranks_change_the_repository": "--ranks --tp_size --cp_size",
        "serve/test_flags.py::test_exported_networks_and_runtimes_are_asked_for": "--networks --runtime",
        "serve/test_signing.py::test_the_repository_holds_paths_alone": C2PA,
        "serve/repository/test_build.py::test_defaults_are_changed_by_the_rules_of_a_request": "--default",
        "serve/repository/test_build.py::test_students_are_models_of_their_own": "--student",
    },
    "serve run": {
        "serve/test_flags.py::test_every_option_reaches_the_server": (
            "--model --host --http_port --grpc_port --metrics_port --control_secret"
        ),
        "serve/test_flags.py::test_every_option_reaches_the_container": "--docker --image --gpus",
        "serve/launch/test_local_server.py::test_models_that_cannot_fit_are_refused": "--even_if_too_large",
        "serve/launch/test_local_server.py::test_a_secret_that_other_people_would_see_is_refused": (
            "--even_if_others_see_it"
        ),
    },
    "serve up": {
        "serve/test_flags.py::test_every_option_reaches_what_is_kept_up": """
            --model --host --port --drain_seconds --hang_seconds --http_port --grpc_port --triton_metrics_port
            --control_secret
        """,
        "serve/gateway/test_drain.py::test_nobody_is_asked_to_drain": "--drain",
        "serve/launch/test_local_server.py::test_models_that_cannot_fit_are_refused": "--even_if_too_large",
        "serve/launch/test_local_server.py::test_a_secret_that_other_people_would_see_is_refused": (
            "--even_if_others_see_it"
        ),
    },
    "serve gateway": {
        "serve/test_flags.py::test_every_option_reaches_the_gateway": """
            --server --model --store --results --result_seconds --host --port --metrics_host --metrics_port --name
            --slots --job_seconds --hang_seconds --max_body_bytes --max_streams --min_free_bytes --history_seconds
            --drain_seconds --max_connections --max_upload_bytes --max_uploads --adapters --c2pa_certificate --c2pa_key
            --private_webhooks
            --cors_origin
        """
    },
    "serve webhooks": {
        "serve/gateway/jobs/test_webhooks.py::test_what_was_given_up_is_listed_and_sent_again": (
            "--store --private_webhooks"
        ),
    },
    "serve keys": {
        "serve/test_flags.py::test_every_option_of_a_key_is_written_down": """
            --store --requests_per_minute --max_active --videos_per_day --max_stored_bytes --max_upload_bytes --webhook
            --max_adapters --max_adapter_bytes
        """
    },
    "serve ask": SIZE
    | {
        REQUEST: """
            --output --url --model --timeout --priority --key_file --patience --negative_prompt --sampler --seed
            --guidance --num_steps --num_video_frames --height --width --fps --num_videos --eta --image_guidance
            --input_video --strength --continue_video --lead_to_video --keep_frames --image --last_image --keyframe
            --video --mask --instruction --adapter --evaluate
        """
    },
    "serve demo": {
        "serve/test_flags.py::test_every_option_reaches_the_page": "--url --bundle --student --key_file --host --port",
    },
    "info": {
        "infer/inspect/test_info.py::test_command_prints_a_table_or_json": "--json",
        "train/data/test_whole_shards.py::test_verify_reads_every_byte": "--verify",
        "infer/inspect/test_info.py::test_what_is_off_is_shown_on_demand": "--all",
        f"{VIDEOS}::test_a_sheet_shows_samples": "--sheet",
        "infer/inspect/test_info.py::test_a_page_shows_a_run": "--html",
    },
    "new": {
        "train/new/test_command.py::test_options_reach_the_proposal": "--out --captions --gpu --gpus --minutes",
        "train/new/test_command.py::test_what_is_proposed_becomes_a_model": "--go",
    },
    "doctor": {
        f"{RANKS}::test_command_starts_its_own_ranks_and_finds_them_healthy_enough": "--distributed --nproc",
        "test_deploy.py::test_doctor_names_what_is_missing": "--extras",
    },
    "completion": {},
    "demo": {
        "train/demos/digits/test_demo.py::test_every_option_reaches_the_demo": "--out --ranks --quick --all_guidances"
    },
    "demo-shapes": {"train/demos/shapes/test_demo.py::test_every_option_reaches_the_demo": "--out --ranks --quick"},
    "demo-conditioning": {
        "train/demos/digits/test_conditioning_demo.py::test_every_option_reaches_the_demo": (
            "--out --bundle --ranks --steps --stride --seed"
        )
    },
    "demo-distill": {
        "train/demos/digits/test_distill_demo.py::test_every_option_reaches_the_demo": (
            "--out --bundle --ranks --steps --stride --seed"
        )
    },
    "demo-adapter": {
        "train/demos/digits/test_subject.py::test_every_option_reaches_the_demo": (
            "--out --bundle --word --ranks --steps --seed"
        )
    },
    "demo-reward": {
        "train/demos/digits/test_reward_demo.py::test_every_option_reaches_the_demo": (
            "--out --bundle --ranks --rounds --prompts_per_round --seed"
        )
    },
}
"""Command -> test -> the flags that it shows. Of a flag with several names, the first long one."""


@cache
def parsers() -> dict[str, CommandParser]:
    """The parser of each command, taken where the command begins to parse."""
    from megadit.train.data.prepare.command import SOURCES

    found: dict[str, CommandParser] = {}

    def note(parser: CommandParser, *_: object) -> None:
        found[parser.prog.removeprefix("megadit ")] = parser
        raise SystemExit

    with mock.patch.object(CommandParser, "parse_args", note):
        for verb in verbs.VERBS:
            for words in [[source] for source in SOURCES] if verb == "prepare" else [[]]:
                with suppress(SystemExit):
                    verbs.load(verb)(words)
    return found


def flags(parser: CommandParser) -> list[str]:
    """One name of each."""
    named = [action.option_strings for action in parser._actions if action.dest != "help" and action.option_strings]
    return sorted(next(name for name in names if name.startswith("--")) for names in named)


def test_every_command_is_here():
    assert set(parsers()) == set(SHOWN_BY)


@pytest.mark.parametrize("command", SHOWN_BY)
def test_every_flag_has_a_test(command):
    named = " ".join(SHOWN_BY[command].values()).split()
    assert sorted(named) == flags(parsers()[command])


@pytest.mark.parametrize("command", SHOWN_BY)
def test_examples_of_the_help_are_read(command):
    """With options that are there, and values that they take."""
    parser = parsers()[command]
    for example in parser.examples:
        words = shlex.split(example)
        assert words[: 1 + len(command.split())] == ["megadit", *command.split()]
        assert CommandParser.parse_args(parser, words[1 + len(command.split()) :])
    assert parser.examples or len(flags(parser)) <= MOST_IN_ONE_LIST


def test_options_are_declared_as_settings_alone():
    """`add_argument` stands in the engine and nowhere else."""
    engine = "models/shared/cli/options.py"
    folders = ("models", "infer", "train", "export", "serve", "tests/benchmarks")
    files = [file for folder in folders for file in (ROOT.parent / folder).rglob("*.py")]
    calling = [str(file.relative_to(ROOT.parent)) for file in files if "add_argument(" in file.read_text()]
    assert calling == [engine]


TESTS = sorted({test for tests in SHOWN_BY.values() for test in tests})


@pytest.mark.parametrize("test", TESTS)
def test_the_test_is_there_and_gives_its_flags(test):
    given = words_of(test)
    assert given, f"there is no {test}"
    for command, tests in SHOWN_BY.items():
        missing = set(tests.get(test, "").split()) - given
        assert not missing, f"{test} is said to show {sorted(missing)} of {command}"


def test_what_is_not_given_is_noticed():
    """The control of the test above."""
    assert "--prompt" in words_of(MADE) and "--no_such_flag" not in words_of(MADE)
    assert not words_of("infer/test_flags.py::test_no_such_test")
    assert "--sheet" not in words_of(f"{VIDEOS}::test_shards_of_a_split_are_equally_large")


# ------------------------------------------------------------------------------------------------ reading tests


def words_of(test: str) -> set[str]:
    """All flags in the text of a test and of whatever it uses, fixtures of conftest.py included; `_` for `-`."""
    file, _, name = test.partition("::")
    known = definitions(file)
    found: set[str] = set()
    seen, left = set(), [name]
    while left:
        if (name := left.pop()) in seen or name not in known:
            continue
        seen.add(name)
        strings, names = known[name]
        found |= strings
        left += names
    return found | {f"--{flag[2:].replace('_', '-')}" for flag in found}


@cache
def definitions(file: str) -> dict[str, tuple[set[str], set[str]]]:
    """What a file of tests defines, with the conftest.py files above it: the flags and the names in each."""
    path = ROOT / file
    above = [folder / "conftest.py" for folder in reversed(path.relative_to(ROOT).parents)]
    found = {}
    for each in [ROOT / conftest for conftest in above] + [path]:
        for node in ast.parse(each.read_text()).body if each.is_file() else ():
            for name in _defined(node):
                found[name] = _flags_in(node), _names_in(node)
    return found


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]


def _flags_in(node: ast.AST) -> set[str]:
    texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    found = {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
    return {f"--{flag[2:].replace('-', '_')}" for flag in found}


def _names_in(node: ast.AST) -> set[str]:
    used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return used | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
