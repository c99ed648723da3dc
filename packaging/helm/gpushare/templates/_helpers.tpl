{{- /* The chart renders the plain manifests of packaging/kubernetes (links in files/) with the values. */}}

{{- define "gpushare.image" -}}
{{- $registry := required "set image.registry to where you pushed gpushare's images, such as --set image.registry=registry.site/gpu (docs/helm.md)" .root.Values.image.registry -}}
{{ printf "%s/%s:%s" (trimSuffix "/" $registry) .name (.root.Values.image.tag | default .root.Chart.AppVersion) }}
{{- end }}

{{- /* .file: a manifest that names the namespace `gpushare` */}}
{{- define "gpushare.namespaced" -}}
{{- $namespace := .root.Release.Namespace -}}
{{ .root.Files.Get .file | replace "namespace: gpushare\n" (printf "namespace: %s\n" $namespace) | replace "system:serviceaccount:gpushare:" (printf "system:serviceaccount:%s:" $namespace) }}
{{- end }}

{{- /* .file: a DaemonSet's manifest; .values: its tolerations and resources; .image: the name of its image */}}
{{- define "gpushare.daemonset" -}}
{{- $set := .root.Files.Get .file | fromYaml -}}
{{- $_ := set $set.metadata "namespace" .root.Release.Namespace -}}
{{- $pod := $set.spec.template.spec -}}
{{- $container := index $pod.containers 0 -}}
{{- $_ := set $container "image" (include "gpushare.image" (dict "root" .root "name" .image)) -}}
{{- $_ := set $container "imagePullPolicy" .root.Values.image.pullPolicy -}}
{{- $_ := set $container "resources" .values.resources -}}
{{- $_ := set $pod "tolerations" .values.tolerations -}}
{{- with .root.Values.image.pullSecrets -}}
{{- $secrets := list -}}
{{- range . }}{{ $secrets = append $secrets (dict "name" .) }}{{ end -}}
{{- $_ := set $pod "imagePullSecrets" $secrets -}}
{{- end -}}
{{- toYaml $set -}}
{{- end }}
