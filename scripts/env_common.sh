# shellcheck shell=bash
# Sourced by the scripts that make environments.

# layer_env DIR BASE: the virtual environment DIR on top of BASE, an environment made by make_env.sh, which stays as it is.
# Sets `pip` (an array) to what installs into DIR.
layer_env() {
    local env=$1 base=$2 packages below
    [ -x "$base/bin/python" ] || { echo "$(basename "$0" .sh): $base is no environment: it has no bin/python" >&2; exit 2; }
    [ -x "$env/bin/python" ] || "$base/bin/python" -m venv --without-pip "$env"
    packages=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    below=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # addsitedir, not a bare path: the .pth files of BASE count too (its editable reef-slime, nvidia's packages).
    echo "import site; site.addsitedir('$below')" > "$packages/reef_slime_base.pth"
    # shellcheck disable=SC2034  # for whoever sources this
    pip=("$base/bin/python" -m pip --python "$env/bin/python")
}
