{{- /* The chart renders the plain manifests of packaging/kubernetes (links in files/) with the values. */}}

{{- define "gpushare.image" -}}
{{- $registry := required "set image.registry to where you pushed gpushare's images, such as --set image.registry=registry.site/gpu (docs/helm.md)" .root.Values.image.registry -}}
{{- $digest := get (.root.Values.image.digests | default dict) (trimPrefix "gpushare-" .name) -}}
{{ printf "%s/%s" (trimSuffix "/" $registry) .name }}{{ if $digest }}{{ printf "@%s" $digest }}{{ else }}{{ printf ":%s" (.root.Values.image.tag | default .root.Chart.AppVersion) }}{{ end }}
{{- end }}

{{- /* .file: a manifest that names the namespace `gpushare` */}}
{{- define "gpushare.namespaced" -}}
{{- $namespace := .root.Release.Namespace -}}
{{ .root.Files.Get .file | replace "namespace: gpushare\n" (printf "namespace: %s\n" $namespace) | replace "system:serviceaccount:gpushare:" (printf "system:serviceaccount:%s:" $namespace) | replace "[kube-system, gpushare]" (printf "[kube-system, %s]" $namespace) }}
{{- end }}

{{- /* Let a DaemonSet watch Xid errors: .set, .xid: the values. The set changes in place. */}}
{{- define "gpushare.xid" -}}
{{- $pod := .set.spec.template.spec -}}
{{- $container := index $pod.containers 0 -}}
{{- $ignored := list -}}
{{- range .xid.ignore }}{{ $ignored = append $ignored (toString .) }}{{ end -}}
{{- $args := append $container.args "--nvml=/driver/libnvidia-ml.so.1" -}}
{{- $_ := set $container "args" (append $args (printf "--ignore-xid=%s" (join "," $ignored | default "none"))) -}}
{{- $_ := set $container "securityContext" (dict "privileged" true "runAsUser" 0 "readOnlyRootFilesystem" true) -}}
{{- $_ := set $container "volumeMounts" (append $container.volumeMounts (dict "name" "driver" "mountPath" "/driver" "readOnly" true)) -}}
{{- $_ := set $pod "volumes" (append $pod.volumes (dict "name" "driver" "hostPath" (dict "path" .xid.folder "type" "Directory"))) -}}
{{- end }}

{{- /* .file: a DaemonSet's manifest; .values: its tolerations and resources; .image: the name of its image */}}
{{- define "gpushare.daemonset" -}}
{{- $folder := .root.Values.folder | default "/opt/gpushare" -}}
{{- $set := .root.Files.Get .file | replace "/opt/gpushare" $folder | fromYaml -}}
{{- $_ := set $set.metadata "namespace" .root.Release.Namespace -}}
{{- $pod := $set.spec.template.spec -}}
{{- $container := index $pod.containers 0 -}}
{{- $_ := set $container "image" (include "gpushare.image" (dict "root" .root "name" .image)) -}}
{{- $_ := set $container "imagePullPolicy" .root.Values.image.pullPolicy -}}
{{- $_ := set $container "resources" .values.resources -}}
{{- if and (ne $folder "/opt/gpushare") (eq .image "gpushare-installer") -}}
{{- $_ := set $container "env" (append ($container.env | default list) (dict "name" "GPUSHARE_FOLDER" "value" $folder)) -}}
{{- end -}}
{{- $_ := set $pod "tolerations" .values.tolerations -}}
{{- $_ := set $pod.nodeSelector "kubernetes.io/arch" (.root.Values.image.architecture | default "amd64") -}}
{{- with .root.Values.image.pullSecrets -}}
{{- $secrets := list -}}
{{- range . }}{{ $secrets = append $secrets (dict "name" .) }}{{ end -}}
{{- $_ := set $pod "imagePullSecrets" $secrets -}}
{{- end -}}
{{- toYaml $set -}}
{{- end }}
