# Sourced by the job scripts: what starts a program on each node.
#   MPT_IMAGE=mpt.sif sbatch ...    in an Apptainer image of containers/, with its packages and with
#                                   the code of this folder. APPTAINER_BIND=/scratch: other folders
# Without MPT_IMAGE: the .venv of this folder. Slingshot's libraries are the host's: the operators
# say which folders to bind.
# shellcheck shell=bash disable=SC2034  # the scripts use both variables
container=()
bin=.venv/bin
if [[ ${MPT_IMAGE:-} ]]; then
    gpu=--nv
    if [[ -e /dev/kfd ]]; then
        gpu=--rocm
    fi
    container=(apptainer exec "$gpu" --bind "$PWD" --pwd "$PWD" "$MPT_IMAGE")
    bin=/opt/mpt/.venv/bin
fi
